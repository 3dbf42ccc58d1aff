#include "src/io/input_file.h"

#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "snug/core.h"

namespace snug::detail {
namespace {

[[noreturn]] void fail(const char* what, const std::string& name, int descriptor) {
  const std::string reason = std::error_code(errno, std::generic_category()).message();
  if (descriptor >= 0) {
    ::close(descriptor);
  }
  throw Error(fmt::format("InputFile: {} cannot be {}: {}", name, what, reason));
}

}  // namespace

InputFile::InputFile(const std::filesystem::path& path) : name_(path.string()) {
  do {
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  } while (descriptor_ < 0 && errno == EINTR);
  struct stat status{};
  if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0) {
    fail("opened", name_, descriptor_);
  }
  if (!S_ISREG(status.st_mode)) {
    errno = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
    fail("read as a file", name_, descriptor_);
  }
  size_ = status.st_size;
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::read_at(int64_t offset, std::span<char> target) const {
  while (!target.empty()) {
    const ssize_t got = ::pread(descriptor_, target.data(), target.size(), offset);
    if (got < 0 && errno != EINTR) {
      fail("read", name_, -1);
    }
    if (got == 0) {
      throw CorruptFile(
          fmt::format("InputFile: {} ends after {} bytes, {} more were expected; did something cut it short?", name_,
                      offset, target.size()));
    }
    if (got > 0) {
      offset += got;
      target = target.subspan(static_cast<size_t>(got));
    }
  }
}

}  // namespace snug::detail
