#pragma once
// What an error says, without the stack that LibTorch's go on with.

#include <exception>
#include <string>

namespace snug::detail {

inline std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace snug::detail
