#pragma once
// FileMemory: bytes of a file, used as memory. The system reads their pages when they are accessed, and takes them back
// when it needs the memory. They are therefore no tensor memory: no MemoryLimit counts them, and they need not stay in
// RAM. If the disk fails, an access ends the process.
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
  /// The first `bytes` of an open file. Writes to this memory stay in this process; writes to the file show here, but
  /// for pages of this memory that were written. Throws Error, naming `file`.
  static std::shared_ptr<FileMemory> of(int descriptor, int64_t bytes, const std::string& file);
  /// Zeros, in a file without a name in `directory`, for which room is reserved on the disk. Throws Error if the file
  /// cannot be made that long.
  static std::shared_ptr<FileMemory> in(const std::filesystem::path& directory, int64_t bytes);
  ~FileMemory();
  FileMemory(const FileMemory&) = delete;
  FileMemory& operator=(const FileMemory&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  int64_t bytes() const { return bytes_; }

  /// Whether that is memory that in() gave.
  static bool holds(const void* data) noexcept;
  /// The pages of such memory leave this process, those at both ends too; an access brings them back. No effect on
  /// other memory.
  static void let_go(const void* data, int64_t bytes) noexcept;
  /// The system begins to read them.
  static void read_ahead(const void* data, int64_t bytes) noexcept;

 private:
  FileMemory(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}

  void* data_;
  int64_t bytes_;
  bool is_held_ = false;  // in the list that holds() looks at
};

/// Whether it lies in memory that FileMemory::in() gave. False of a sparse tensor, which has no memory of its own.
bool is_in_file(const at::Tensor& tensor);

/// FileMemory::let_go of all that it has.
void let_go_of_pages(const at::Tensor& tensor);

/// Calls `work` with all tensors, unless there are none. If some lie in files: one by one, and its pages are let go
/// after each, so that few of them are in memory at a time.
void for_each_in_files(const std::vector<at::Tensor>& tensors, const std::function<void(at::TensorList)>& work);

/// The tensor at `offset`, in bytes. It keeps the memory alive.
at::Tensor tensor_in(const std::shared_ptr<FileMemory>& memory, int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides, at::ScalarType dtype);

}  // namespace snug::detail
