#pragma once
// FileMemory: bytes of a file, used as memory. The system reads the pages of the file when the pages are accessed, and
// takes the pages back when the system needs the memory. FileMemory is therefore not tensor memory: no MemoryLimit
// counts the bytes, and the bytes need not stay in RAM. If the disk fails, an access ends the process.
//
//   auto memory = FileMemory::in("run", 4 * 10);
//   at::Tensor ten = tensor_in(memory, 0, {10}, {1}, at::kFloat);

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug::detail {

class FileMemory final {
 public:
  /// The first `bytes` of an open file. Writes to the memory stay in this process. Writes to the file show in the
  /// memory, except in pages of the memory that were written. Throws Error, naming `file`.
  static std::shared_ptr<FileMemory> of(int descriptor, int64_t bytes, const std::string& file);
  /// Zeros, in a file without a name in `directory`, with room reserved on the disk. Throws Error if the file cannot be
  /// made `bytes` long.
  static std::shared_ptr<FileMemory> in(const std::filesystem::path& directory, int64_t bytes);
  ~FileMemory();
  FileMemory(const FileMemory&) = delete;
  FileMemory& operator=(const FileMemory&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  int64_t bytes() const { return bytes_; }

  /// Whether `data` points into memory made by in().
  static bool holds(const void* data) noexcept;
  /// Removes the pages of memory made by in() from this process, also the partly covered pages at both ends. An access
  /// brings the pages back. Has no effect on other memory.
  static void let_go(const void* data, int64_t bytes) noexcept;
  /// Makes the system begin to read the pages of memory made by in().
  static void read_ahead(const void* data, int64_t bytes) noexcept;

 private:
  FileMemory(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}

  void* data_;
  int64_t bytes_;
  bool is_held_ = false;  // whether the list of holds() has the mapping
};

/// Whether `tensor` lies in memory made by FileMemory::in(). False for a sparse tensor, which has no memory of its own.
bool is_in_file(const at::Tensor& tensor);

/// Calls FileMemory::let_go for all bytes of `tensor`, if `tensor` lies in a file.
void let_go_of_pages(const at::Tensor& tensor);

/// Calls `work` with all tensors at once; makes no call without tensors. If some tensors lie in files, calls `work`
/// with one tensor at a time, and lets go of the tensor's pages after each call, so few pages are in memory at a time.
void for_each_in_files(const std::vector<at::Tensor>& tensors, const std::function<void(at::TensorList)>& work);

/// The tensor at `offset`, in bytes. The tensor keeps the memory alive.
at::Tensor tensor_in(const std::shared_ptr<FileMemory>& memory, int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides, at::ScalarType dtype);

}  // namespace snug::detail
