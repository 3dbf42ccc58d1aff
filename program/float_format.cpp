#include "program/float_format.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace snug::cli {
namespace {

const double kDigitsPerBit = std::log10(2.0);

// For numbers as large as x, the distance from one number to the next is 2 to the power of step_exponent. Below
// min_normal the distance shrinks no further.
int step_exponent(const FloatFormat& format, double x) {
  const int exponent = x == 0 ? format.min_exponent() : std::ilogb(x);
  return std::max(exponent, format.min_exponent()) - format.fraction_bits;
}

// Not std::nearbyint, which obeys the thread's rounding mode.
double nearest_even(double x) {
  const double below = std::floor(x);
  const double rest = x - below;
  const bool is_odd = std::fmod(below, 2) != 0;
  return rest > 0.5 || (rest == 0.5 && is_odd) ? below + 1 : below;
}

double nearest(const FloatFormat& format, double x) {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  const double beyond = format.has_infinity ? infinite : format.max();
  if (std::isnan(x)) {
    return x;
  }
  double magnitude = std::abs(x);
  if (magnitude < infinite) {
    // Scaling by a power of two is exact here, so that x is rounded only once.
    const int step = step_exponent(format, magnitude);
    magnitude = std::ldexp(nearest_even(std::ldexp(magnitude, -step)), step);
  }
  return std::copysign(magnitude > format.max() ? beyond : magnitude, x);
}

// The fields of a number that the format has.
FloatBits encode(const FloatFormat& format, double value) {
  const uint32_t all_exponent = (1U << format.exponent_bits) - 1;
  const uint32_t hidden_bit = 1U << format.fraction_bits;
  FloatBits bits{.sign = std::signbit(value) ? 1U : 0U};
  if (std::isnan(value)) {
    bits.exponent = all_exponent;
    bits.fraction = format.has_infinity ? hidden_bit >> 1 : hidden_bit - 1;
  } else if (std::isinf(value)) {
    bits.exponent = all_exponent;
  } else {
    const int step = step_exponent(format, value);
    const auto steps = static_cast<uint32_t>(std::ldexp(std::abs(value), -step));
    const bool is_normal = steps >= hidden_bit;
    bits.exponent = is_normal ? static_cast<uint32_t>(step + format.fraction_bits + format.bias()) : 0;
    bits.fraction = is_normal ? steps - hidden_bit : steps;
  }
  return bits;
}

FloatVerdict judge(const FloatFormat& format, double x, double value) {
  if (std::isnan(x)) {
    return FloatVerdict::NotANumber;
  }
  if (value == x) {
    return FloatVerdict::Exact;
  }
  const double step = std::ldexp(1.0, step_exponent(format, format.max()));
  if (!std::isfinite(value) || std::abs(x) > format.max() + step / 2) {
    return FloatVerdict::Overflow;
  }
  if (value == 0) {
    return FloatVerdict::Underflow;
  }
  return std::abs(value) < format.min_normal() ? FloatVerdict::Subnormal : FloatVerdict::Rounding;
}

}  // namespace

double FloatFormat::max() const {
  // Without infinities the topmost fraction is NaN.
  return std::ldexp(has_infinity ? 2 - epsilon() : 2 - 2 * epsilon(), max_exponent());
}
double FloatFormat::min_normal() const { return std::ldexp(1.0, min_exponent()); }
double FloatFormat::min_subnormal() const { return std::ldexp(1.0, min_exponent() - fraction_bits); }
double FloatFormat::epsilon() const { return std::ldexp(1.0, -fraction_bits); }
double FloatFormat::decimal_digits() const { return (fraction_bits + 1) * kDigitsPerBit; }
int FloatFormat::digits_to_tell_apart() const { return static_cast<int>(std::ceil(1 + decimal_digits())); }

std::string_view to_string(FloatVerdict verdict) {
  constexpr std::array<std::string_view, 6> kNames{"exact", "rounding", "subnormal", "underflow", "overflow", "nan"};
  return kNames[static_cast<size_t>(verdict)];
}

RoundedFloat round_to(const FloatFormat& format, double x) {
  RoundedFloat rounded{.value = nearest(format, x)};
  rounded.bits = encode(format, rounded.value);
  rounded.verdict = judge(format, x, rounded.value);
  if (rounded.value != x) {  // infinity minus infinity is NaN
    rounded.error = rounded.value - x;
    rounded.relative_error = std::abs(rounded.error / x);
  }
  return rounded;
}

}  // namespace snug::cli
