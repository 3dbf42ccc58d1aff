#pragma once
// The operating system's description of an error.

#include <string>
#include <system_error>

namespace snug::detail {

/// The message of `reason`. For "File too large" the message also names the limit behind the error.
inline std::string system_reason(const std::error_code& reason) {
  return reason.message() + (reason == std::errc::file_too_large ? " (see ulimit -f)" : "");
}

}  // namespace snug::detail
