#include "program/printable.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>

#include <fmt/format.h>

namespace snug::cli {
namespace {

// The size in bytes of the printable character at the beginning of `text`, which is not empty; 0: no printable
// character.
size_t printable_size(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) {
    return byte(0) >= 0x20 && byte(0) != 0x7F ? 1 : 0;
  }
  const size_t size = byte(0) >= 0xF0 ? 4 : byte(0) >= 0xE0 ? 3 : 2;
  if (byte(0) < 0xC2 || byte(0) > 0xF4 || text.size() < size) {
    return 0;
  }
  uint32_t code = byte(0) & (0xFFU >> (size + 1));
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0U) != 0x80) {
      return 0;
    }
    code = (code << 6U) | (byte(i) & 0x3FU);
  }
  constexpr std::array<uint32_t, 5> kLeast{0, 0, 0x80, 0x800, 0x10000};
  const bool is_character = code >= kLeast[size] && code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF);
  const bool is_control = code < 0xA0 || code == 0x2028 || code == 0x2029 || (code >= 0x202A && code <= 0x202E) ||
                          (code >= 0x2066 && code <= 0x2069);  // the last characters turn the direction of text
  return is_character && !is_control ? size : 0;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const size_t size = printable_size(text);
    if (size > 0) {
      shown += text.substr(0, size);
    } else if (text[0] == '\n') {
      shown += "\\n";
    } else {
      fmt::format_to(std::back_inserter(shown), "\\x{:02x}", static_cast<unsigned char>(text[0]));
    }
    text.remove_prefix(std::max<size_t>(size, 1));
  }
  return shown;
}

}  // namespace snug::cli
