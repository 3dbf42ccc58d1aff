#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug {
namespace {

struct Unit {
  std::string_view name;  // in lower case
  int64_t bytes;
};

constexpr int64_t power(int64_t base, int exponent) { return exponent == 0 ? 1 : base * power(base, exponent - 1); }

constexpr std::array<Unit, 14> kUnits{{
    {"", 1},
    {"b", 1},
    {"k", power(1024, 1)},
    {"kib", power(1024, 1)},
    {"kb", power(1000, 1)},
    {"m", power(1024, 2)},
    {"mib", power(1024, 2)},
    {"mb", power(1000, 2)},
    {"g", power(1024, 3)},
    {"gib", power(1024, 3)},
    {"gb", power(1000, 3)},
    {"t", power(1024, 4)},
    {"tib", power(1024, 4)},
    {"tb", power(1000, 4)},
}};

// std::isdigit and std::tolower are not used, because both depend on the locale.
bool is_digit(char c) { return c >= '0' && c <= '9'; }
char to_lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

std::string normalized(std::string_view text) {
  while (!text.empty() && text.front() == ' ') {
    text.remove_prefix(1);
  }
  while (!text.empty() && text.back() == ' ') {
    text.remove_suffix(1);
  }
  std::string lowered(text);
  std::transform(lowered.begin(), lowered.end(), lowered.begin(), to_lower);
  return lowered;
}

// Cuts the leading digits off `text` and returns them.
std::string_view take_digits(std::string_view& text) {
  const auto end = std::find_if_not(text.begin(), text.end(), is_digit);
  const auto length = static_cast<size_t>(end - text.begin());
  const std::string_view digits = text.substr(0, length);
  text.remove_prefix(length);
  return digits;
}

// `whole` and `fraction` are digits. The result is negative if the amount does not fit. The whole part is computed
// exactly; a double is not exact beyond 2^53.
int64_t times(std::string_view whole, std::string_view fraction, int64_t unit) {
  int64_t count = 0;
  const auto parsed = std::from_chars(whole.data(), whole.data() + whole.size(), count);
  if (parsed.ec != std::errc() || __builtin_mul_overflow(count, unit, &count)) {
    return -1;
  }
  double digit_value = static_cast<double>(unit);
  double bytes = 0;
  for (const char digit : fraction) {
    digit_value /= 10;
    bytes += digit_value * (digit - '0');
  }
  return __builtin_add_overflow(count, std::llround(bytes), &count) ? -1 : count;
}

// 2^63 is the first double that an int64_t does not hold.
Bytes nearest(double bytes) { return bytes >= 0x1p63 ? Bytes::unlimited() : Bytes(std::llround(bytes)); }

}  // namespace

Bytes::Bytes(int64_t count) : count_(count) {
  if (count < 0) {
    throw ConfigError(fmt::format(
        "Bytes: the amount is {} bytes; give 0 or more (was a difference taken the wrong way round?)", count));
  }
}

Bytes operator+(Bytes a, Bytes b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a.count_, b.count_, &sum) ? Bytes::unlimited() : Bytes(sum);
}

Bytes operator-(Bytes a, Bytes b) {
  if (a < b || b.is_unlimited()) {
    throw ConfigError(fmt::format("Bytes: {} less {} is no amount of bytes; compare first", a.str(), b.str()));
  }
  return a.is_unlimited() ? a : Bytes(a.count_ - b.count_);
}

Bytes operator*(Bytes bytes, double factor) {
  if (!(factor >= 0) || std::isinf(factor)) {
    throw ConfigError(fmt::format("Bytes: the factor is {}; give a finite number >= 0", factor));
  }
  return bytes.is_unlimited() && factor > 0 ? bytes : nearest(static_cast<double>(bytes.count_) * factor);
}

Bytes operator/(Bytes bytes, double divisor) {
  if (!(divisor > 0) || std::isinf(divisor)) {
    throw ConfigError(fmt::format("Bytes: the divisor is {}; give a finite number > 0", divisor));
  }
  return bytes.is_unlimited() ? bytes : nearest(static_cast<double>(bytes.count_) / divisor);
}

Bytes Bytes::unlimited() { return Bytes(kUnlimited); }

Bytes Bytes::parse(std::string_view text) {
  const auto fail = [&](std::string_view what) {
    return ConfigError(fmt::format(
        "Bytes.parse: \"{}\" {}; write a number and a unit, such as 1.5GiB, 300MB, 2048 or unlimited", text, what));
  };
  const std::string lowered = normalized(text);
  if (lowered == "unlimited") {
    return unlimited();
  }
  std::string_view rest = lowered;
  const std::string_view whole = take_digits(rest);
  std::string_view fraction = "0";
  if (rest.starts_with('.')) {
    rest.remove_prefix(1);
    fraction = take_digits(rest);
  }
  if (whole.empty() || fraction.empty()) {
    throw fail("is not an amount of memory");
  }
  const std::string unit_name = normalized(rest);
  const auto unit =
      std::find_if(kUnits.begin(), kUnits.end(), [&](const Unit& known) { return known.name == unit_name; });
  if (unit == kUnits.end()) {
    throw fail(fmt::format("has an unknown unit, \"{}\"", unit_name));
  }
  if (fraction != "0" && unit->bytes == 1) {
    throw fail("is a fraction without a unit");
  }
  const int64_t count = times(whole, fraction, unit->bytes);
  if (count < 0 || count == kUnlimited) {
    throw fail("is more than a 64-bit number of bytes holds");
  }
  return Bytes(count);
}

std::string Bytes::str() const {
  if (is_unlimited()) {
    return "unlimited";
  }
  if (count_ < 1024) {
    return fmt::format("{} B", count_);
  }
  constexpr std::array<std::string_view, 6> kNames{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double amount = static_cast<double>(count_) / 1024;
  size_t unit = 0;
  // 1023.995 and above would print as 1024.00, which is 1.00 of the next unit.
  while (amount >= 1023.995 && unit + 1 < kNames.size()) {
    amount /= 1024;
    ++unit;
  }
  return fmt::format("{:.2f} {}", amount, kNames[unit]);
}

}  // namespace snug
