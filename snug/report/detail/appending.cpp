#include "snug/report/detail/appending.h"

#include <cerrno>
#include <system_error>

#include <fmt/format.h>
#include <unistd.h>

namespace snug::detail {

Error system_error(std::string_view where, const std::filesystem::path& path, int reason) {
  return Error(
      fmt::format("{}: {}: {}", where, path.string(), std::error_code(reason, std::generic_category()).message()));
}

void append_whole(int file, std::string_view bytes, std::string_view who, const std::filesystem::path& path) {
  const off_t before = ::lseek(file, 0, SEEK_END);
  ssize_t written = -1;
  do {
    written = ::write(file, bytes.data(), bytes.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(bytes.size())) {
    return;
  }
  const int reason = written < 0 ? errno : ENOSPC;
  // Otherwise the next piece would follow the torn one directly, and the file could no longer be read.
  const bool taken_back = written < 0 || ::ftruncate(file, before) == 0;
  throw system_error(fmt::format("{}.{}", who, taken_back ? "write" : "write (and a torn piece is left)"), path,
                     reason);
}

}  // namespace snug::detail
