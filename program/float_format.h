#pragma once
// The float formats of training, and the rounding of a number to each format: computed from the formats' definitions,
// without torch.
//
//   const auto rounded = round_to(kFp16, 0.00006666666);
//   rounded.value;    // 6.6638e-05
//   rounded.verdict;  // FloatVerdict::Rounding

#include <array>
#include <cstdint>
#include <string_view>

namespace snug::cli {

/// A binary format of one sign bit, exponent bits and fraction bits, with the layout of IEEE 754. All values below are
/// exact.
struct FloatFormat {
  std::string_view name;
  int exponent_bits = 0;
  int fraction_bits = 0;
  /// False for FP8 E4M3 (torch's Float8_e4m3fn): the highest exponent holds numbers too, and only all ones is NaN.
  bool has_infinity = true;

  int bits() const { return 1 + exponent_bits + fraction_bits; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int min_exponent() const { return 1 - bias(); }
  int max_exponent() const { return has_infinity ? bias() : bias() + 1; }

  double max() const;                ///< the largest finite number
  double min_normal() const;         ///< the smallest positive number with a full fraction
  double min_subnormal() const;      ///< the smallest positive number
  double epsilon() const;            ///< from 1 to the next larger number
  double decimal_digits() const;     ///< of precision: log10(2) for each bit of the fraction and the implicit one
  int digits_to_tell_apart() const;  ///< significant decimal digits that no two numbers of the format share
};

inline constexpr FloatFormat kFp32{.name = "FP32", .exponent_bits = 8, .fraction_bits = 23};
inline constexpr FloatFormat kTf32{.name = "TF32", .exponent_bits = 8, .fraction_bits = 10};
inline constexpr FloatFormat kBf16{.name = "BF16", .exponent_bits = 8, .fraction_bits = 7};
inline constexpr FloatFormat kFp16{.name = "FP16", .exponent_bits = 5, .fraction_bits = 10};
inline constexpr FloatFormat kFp8E4m3{
    .name = "FP8 E4M3", .exponent_bits = 4, .fraction_bits = 3, .has_infinity = false};
inline constexpr FloatFormat kFp8E5m2{.name = "FP8 E5M2", .exponent_bits = 5, .fraction_bits = 2};
inline constexpr std::array<FloatFormat, 6> kFloatFormats{kFp32, kTf32, kBf16, kFp16, kFp8E4m3, kFp8E5m2};

enum class FloatVerdict {
  Exact,      ///< the format has this number
  Rounding,   ///< the nearest number, to the format's full precision
  Subnormal,  ///< gradual underflow: so near to zero that fraction bits are lost
  Underflow,  ///< became zero
  Overflow,   ///< beyond the largest number: infinity, or the largest number where the format has no infinity
  NotANumber  ///< was NaN before
};
/// "exact", "rounding", "subnormal", "underflow", "overflow", "nan".
std::string_view to_string(FloatVerdict);

/// The three fields as they stand in memory.
struct FloatBits {
  uint32_t sign = 0;
  uint32_t exponent = 0;
  uint32_t fraction = 0;
};

struct RoundedFloat {
  double value = 0;
  FloatBits bits;
  FloatVerdict verdict = FloatVerdict::Exact;
  double error = 0;           ///< value - x, exact; infinite after an overflow to infinity, NaN where x is NaN
  double relative_error = 0;  ///< |error / x|; 0 where error is 0
};

/// Rounds x once to the nearest number of the format, ties to the even fraction (IEEE 754-2019, 4.3.1), with gradual
/// underflow. Beyond the largest number by half a step or more, the number overflows. FP8 E4M3 then stays at the
/// largest number, as torch's cast does from 2.13 on (before, torch's cast gave NaN), and the verdict is Overflow.
/// A cast of torch from double to a 16- or 8-bit type rounds twice, first to float, and may differ in the last bit.
RoundedFloat round_to(const FloatFormat& format, double x);

}  // namespace snug::cli
