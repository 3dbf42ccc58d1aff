#pragma once
// FileMemory: bytes of a file in the place of memory. The system reads their pages when they are looked at and takes them back when it needs
// the room, so they are no tensor memory: neither to a MemoryLimit nor in truth. Where the disk fails, looking at them ends the process.
//
//   auto memory = FileMemory::in("run", 4 * 10);
//   at::Tensor ten = tensor_in(memory, 0, {10}, {1}, at::kFloat);

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

namespace snug::detail {

class FileMemory final {
 public:
  /// The first `bytes` of an open file. What is written there stays in this process. Throws Error, naming `file`.
  static std::shared_ptr<FileMemory> of(int descriptor, int64_t bytes, const std::string& file);
  /// Zeros, in a file without a name in `directory`, which has room for them. Throws Error if it cannot be made so long.
  static std::shared_ptr<FileMemory> in(const std::filesystem::path& directory, int64_t bytes);
  ~FileMemory();
  FileMemory(const FileMemory&) = delete;
  FileMemory& operator=(const FileMemory&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  int64_t bytes() const { return bytes_; }

 private:
  FileMemory(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}

  void* data_;
  int64_t bytes_;
};

/// What lies at `offset`, in bytes. It keeps the memory alive.
at::Tensor tensor_in(const std::shared_ptr<FileMemory>& memory, int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides, at::ScalarType dtype);

}  // namespace snug::detail
