#include "program/chart/text.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug::chart {
namespace {

constexpr std::string_view kReplacement = "\uFFFD";

unsigned byte_at(std::string_view text, size_t at) {
  return at < text.size() ? static_cast<unsigned char>(text[at]) : 0;
}

// The number of bytes of the UTF-8 character at the start of `text`; 0 if `text` does not start with a UTF-8 character.
// Table 3-7 of the Unicode standard: the second byte's range excludes overlong forms, surrogates and characters beyond
// U+10FFFF.
size_t character_length(std::string_view text) {
  const unsigned lead = byte_at(text, 0);
  if (lead < 0x80) {
    return 1;
  }
  const size_t length = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  const unsigned lowest = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned highest = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (length == 0 || byte_at(text, 1) < lowest || byte_at(text, 1) > highest) {
    return 0;
  }
  for (size_t i = 2; i < length; ++i) {
    if ((byte_at(text, i) & 0xc0) != 0x80) {
      return 0;
    }
  }
  return length;
}

std::string_view escaped_ascii(const char& c) {
  switch (c) {
    case '&':
      return "&amp;";
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '"':
      return "&quot;";
    case '\'':
      return "&#39;";
    case '\n':
    case '\t':
      return {&c, 1};
    default:
      return c < 0x20 || c == 0x7f ? kReplacement : std::string_view(&c, 1);
  }
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string escaped;
  escaped.reserve(text.size() + text.size() / 16);
  while (!text.empty()) {
    const size_t length = character_length(text);
    if (length == 1) {
      escaped += escaped_ascii(text.front());
    } else {
      escaped += length == 0 ? kReplacement : text.substr(0, length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return escaped;
}

std::string grouped(int64_t number) {
  std::string text = fmt::format("{}", number);
  const size_t first_digit = number < 0 ? 1 : 0;
  for (size_t at = text.size(); at > first_digit + 3;) {
    at -= 3;
    text.insert(at, ",");
  }
  return text;
}

std::string rounded(double number) {
  if (std::isnan(number)) {
    return "NaN";
  }
  if (std::isinf(number)) {
    return number > 0 ? "∞" : "−∞";
  }
  if (std::abs(number) < 1e9 && number == std::floor(number)) {
    return grouped(std::llround(number));
  }
  return fmt::format("{:.4g}", number);
}

std::string prefixed(double number) {
  constexpr std::array<std::string_view, 5> kPrefixes{"", " k", " M", " G", " T"};
  if (!std::isfinite(number) || std::abs(number) < 1 || std::abs(number) >= 1e15) {
    return rounded(number);
  }
  size_t prefix = 0;
  // 999.5 and above are printed as 1000, which is 1.00 of the next prefix.
  while (std::abs(number) >= 999.5 && prefix + 1 < kPrefixes.size()) {
    number /= 1000;
    ++prefix;
  }
  const double size = std::abs(number);
  const int decimals = size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f}{}", number, prefix == 0 && number == std::floor(number) ? 0 : decimals,
                     kPrefixes[prefix]);
}

std::string byte_text(int64_t bytes) {
  const int64_t most = Bytes::unlimited().count() - 1;  // a measured amount is never "unlimited"
  return Bytes(std::clamp<int64_t>(bytes, 0, most)).str();
}

std::string duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e12) {
    return rounded(seconds) + " s";
  }
  if (seconds < 10) {
    return fmt::format("{:.2g} s", seconds);
  }
  const int64_t whole = std::llround(seconds);
  if (whole < 60) {
    return fmt::format("{} s", whole);
  }
  if (whole < 3600) {
    return fmt::format("{} min {} s", whole / 60, whole % 60);
  }
  return fmt::format("{} h {} min", grouped(whole / 3600), whole % 3600 / 60);
}

std::string superscript(int number) {
  constexpr std::array<std::string_view, 10> kDigits{"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string raised;
  for (const char c : fmt::format("{}", number)) {
    raised += c == '-' ? std::string_view("⁻") : kDigits[static_cast<size_t>(c - '0')];
  }
  return raised;
}

}  // namespace snug::chart
