#pragma once
// Bytes in the place of a file, for readers that open one.

#include <filesystem>
#include <string_view>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/fuzz/same.h"

namespace snug::fuzz {

/// A file in memory that has a path as long as this lives.
class BytesAsFile {
 public:
  explicit BytesAsFile(std::string_view bytes) : file_(::memfd_create("bytes", MFD_CLOEXEC)) {
    require_same(file_ >= 0 && ::write(file_, bytes.data(), bytes.size()) == std::ssize(bytes));
  }
  ~BytesAsFile() { ::close(file_); }
  BytesAsFile(const BytesAsFile&) = delete;
  BytesAsFile& operator=(const BytesAsFile&) = delete;

  std::filesystem::path path() const { return fmt::format("/proc/self/fd/{}", file_); }

 private:
  int file_;
};

}  // namespace snug::fuzz
