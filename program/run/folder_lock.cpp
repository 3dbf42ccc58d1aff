#include "program/run/folder_lock.h"

#include <array>
#include <cerrno>
#include <string>
#include <string_view>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include "snug/core.h"

namespace snug::detail {
namespace {

constexpr size_t kLongestOwner = 300;

[[noreturn]] void fail_to_lock(int descriptor, const std::filesystem::path& file) {
  const std::error_code reason(errno, std::generic_category());
  if (descriptor >= 0) {
    ::close(descriptor);
  }
  throw Error(fmt::format("train: the run's lock {}: {}", file.string(), reason.message()));
}

// The printable part of the file's content.
std::string owner_in(int descriptor) {
  std::array<char, kLongestOwner> text{};
  const ssize_t size = ::pread(descriptor, text.data(), text.size(), 0);
  std::string owner(text.data(), size > 0 ? static_cast<size_t>(size) : 0);
  std::erase_if(owner, [](unsigned char letter) { return letter < 0x20 || letter > 0x7e; });
  return owner.empty() ? "another process" : owner;
}

std::string this_process() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("process {} on {}", ::getpid(), host.data());
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& out) {
  const std::filesystem::path path = file(out);
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (descriptor_ < 0) {
    fail_to_lock(descriptor_, path);
  }
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      const std::string owner = owner_in(descriptor_);
      ::close(descriptor_);
      throw ConfigError(fmt::format(
          "train: {} trains in '{}' already; wait for its end, stop it, or give another --out", owner, out.string()));
    }
    return;  // a file system without locks
  }
  const std::string owner = this_process() + "\n";
  const bool is_written = ::ftruncate(descriptor_, 0) == 0 && ::pwrite(descriptor_, owner.data(), owner.size(), 0) > 0;
  if (!is_written) {
    fail_to_lock(descriptor_, path);
  }
}

FolderLock::~FolderLock() { ::close(descriptor_); }

}  // namespace snug::detail
