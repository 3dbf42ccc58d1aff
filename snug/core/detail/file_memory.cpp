#include "snug/core/detail/file_memory.h"

#include <cerrno>
#include <cstdlib>
#include <system_error>

#include <ATen/ops/from_blob.h>
#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include "snug/core/bytes.h"
#include "snug/core/error.h"

namespace snug::detail {
namespace {

[[noreturn]] void fail(const char* what, int64_t bytes, const std::string& file, int reason) {
  throw Error(fmt::format("FileMemory: cannot {} {} of {}: {}", what, Bytes(bytes).str(), file,
                          std::generic_category().message(reason)));
}

void* mapped(int descriptor, int64_t bytes, int sharing, const std::string& file) {
  if (bytes == 0) {
    return nullptr;
  }
  void* const data = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, sharing, descriptor, 0);
  if (data == MAP_FAILED) {
    fail("map", bytes, file, errno);
  }
  return data;
}

}  // namespace

std::shared_ptr<FileMemory> FileMemory::of(int descriptor, int64_t bytes, const std::string& file) {
  return std::shared_ptr<FileMemory>(new FileMemory(mapped(descriptor, bytes, MAP_PRIVATE, file), bytes));
}

std::shared_ptr<FileMemory> FileMemory::in(const std::filesystem::path& directory, int64_t bytes) {
  std::string name = (directory / "snug-memory-XXXXXX").string();
  const int descriptor = ::mkostemp(name.data(), O_CLOEXEC);
  if (descriptor < 0) {
    fail("make a file for", bytes, directory.string(), errno);
  }
  const auto close = c10::make_scope_exit([&] { ::close(descriptor); });
  ::unlink(name.c_str());
  // Without room on the disk, writing a page would end the process.
  if (const int reason = bytes == 0 ? 0 : ::posix_fallocate(descriptor, 0, bytes); reason != 0) {
    fail("find room for", bytes, name, reason);
  }
  return std::shared_ptr<FileMemory>(new FileMemory(mapped(descriptor, bytes, MAP_SHARED, name), bytes));
}

FileMemory::~FileMemory() {
  if (data_ != nullptr) {
    ::munmap(data_, static_cast<size_t>(bytes_));
  }
}

at::Tensor tensor_in(const std::shared_ptr<FileMemory>& memory, int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides, at::ScalarType dtype) {
  return at::from_blob(
      memory->data() + offset, sizes, strides, [memory](void*) {}, at::TensorOptions(at::kCPU).dtype(dtype));
}

}  // namespace snug::detail
