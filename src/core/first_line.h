#pragma once
// An error's message without the stack trace that LibTorch appends.

#include <exception>
#include <string>

namespace snug::detail {

inline std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace snug::detail
