#pragma once
// What the operating system says of an error.

#include <string>
#include <system_error>

namespace snug::detail {

/// Its message, with the limit that is behind "File too large".
inline std::string system_reason(const std::error_code& reason) {
  return reason.message() + (reason == std::errc::file_too_large ? " (see ulimit -f)" : "");
}

}  // namespace snug::detail
