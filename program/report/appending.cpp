#include "program/report/appending.h"

#include <cerrno>
#include <system_error>

#include <fmt/format.h>
#include <unistd.h>

#include "src/core/system_reason.h"

namespace snug::detail {

Error system_error(std::string_view where, const std::filesystem::path& path, int reason) {
  return Error(
      fmt::format("{}: {}: {}", where, path.string(), system_reason(std::error_code(reason, std::generic_category()))));
}

void append_whole(int file, std::string_view bytes, std::string_view who, const std::filesystem::path& path) {
  const off_t before = ::lseek(file, 0, SEEK_END);
  size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t taken = ::write(file, bytes.data() + written, bytes.size() - written);
    if (taken > 0) {
      written += static_cast<size_t>(taken);
    } else if (taken == 0 || errno != EINTR) {
      const int reason = taken == 0 ? ENOSPC : errno;
      // If the torn piece stays, the next piece follows the torn piece directly, and the file can no longer be read.
      const bool taken_back = written == 0 || ::ftruncate(file, before) == 0;
      throw system_error(fmt::format("{}.{}", who, taken_back ? "write" : "write (and a torn piece is left)"), path,
                         reason);
    }
  }
}

}  // namespace snug::detail
