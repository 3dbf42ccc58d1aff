#pragma once
// Text for pages: text from outside is escaped, and numbers get a readable form.

#include <cstdint>
#include <string>
#include <string_view>

namespace snug::chart {

/// The text, safe as the content of an element and between double quotes. Bytes that are not UTF-8, and control
/// characters other than tab and line feed, become U+FFFD.
std::string escape_html(std::string_view text);

/// "1,234,567"
std::string grouped(int64_t number);

/// Four significant digits, whole numbers in full: "1.432", "65,536", "1.2e-07", "NaN", "∞".
std::string rounded(double number);

/// "3.21 M", "640": at most three significant digits and a decimal prefix.
std::string prefixed(double number);

/// "1.50 GiB". Negative counts, which only a damaged log has, give 0.
std::string byte_text(int64_t bytes);

/// "0.25 s", "12 s", "3 min 20 s", "2 h 5 min"
std::string duration(double seconds);

/// Raised digits, for powers: superscript(-4) is "⁻⁴".
std::string superscript(int number);

}  // namespace snug::chart
