// Rounding against tables of all numbers of a format, made from its bit patterns by the definition in IEEE 754, and
// against the compiler.

#include "program/float_format.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace snug::cli::float_format_test {

void PrintTo(const FloatFormat& format, std::ostream* out) { *out << format.name; }

namespace {

using Limits = std::numeric_limits<double>;

constexpr FloatFormat kSmallFormats[] = {kTf32, kBf16, kFp16, kFp8E4m3, kFp8E5m2};

uint32_t packed(const FloatFormat& format, const FloatBits& bits) {
  return (((bits.sign << format.exponent_bits) | bits.exponent) << format.fraction_bits) | bits.fraction;
}

// What the pattern of a finite number, without its sign, means.
double meaning(const FloatFormat& format, uint32_t pattern) {
  const int exponent = static_cast<int>(pattern >> format.fraction_bits);
  const double fraction = std::ldexp(pattern & ((1U << format.fraction_bits) - 1), -format.fraction_bits);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
}

uint32_t largest_pattern(const FloatFormat& format) {
  const uint32_t all_ones = (1U << (format.exponent_bits + format.fraction_bits)) - 1;
  return format.has_infinity ? all_ones - (1U << format.fraction_bits) : all_ones - 1;
}

class SmallFormat : public ::testing::TestWithParam<FloatFormat> {};
INSTANTIATE_TEST_SUITE_P(All, SmallFormat, ::testing::ValuesIn(kSmallFormats), [](const auto& tested) {
  std::string name(tested.param.name);
  std::erase(name, ' ');
  return name;
});

TEST_P(SmallFormat, LeavesEachOfItsNumbersAsItIs) {
  const FloatFormat& format = GetParam();
  for (uint32_t pattern = 0; pattern <= largest_pattern(format); ++pattern) {
    for (const double x : {meaning(format, pattern), -meaning(format, pattern)}) {
      const auto rounded = round_to(format, x);
      ASSERT_EQ(rounded.value, x);
      ASSERT_EQ(rounded.verdict, FloatVerdict::Exact);
      ASSERT_EQ(rounded.error, 0);
      const uint32_t sign = std::signbit(x) ? 1U << (format.bits() - 1) : 0;
      ASSERT_EQ(packed(format, rounded.bits), sign | pattern) << x;
    }
  }
}

// Rounding rises with x, so what holds on both sides of every midpoint holds everywhere.
TEST_P(SmallFormat, TakesTheNearerNumberOnBothSidesOfEveryMidpointAndTheEvenOneOnIt) {
  const FloatFormat& format = GetParam();
  for (uint32_t pattern = 0; pattern < largest_pattern(format); ++pattern) {
    const double below = meaning(format, pattern);
    const double above = meaning(format, pattern + 1);
    const double middle = (below + above) / 2;
    const double even = pattern % 2 == 0 ? below : above;
    ASSERT_EQ(round_to(format, std::nextafter(middle, below)).value, below);
    ASSERT_EQ(round_to(format, middle).value, even);
    ASSERT_EQ(round_to(format, std::nextafter(middle, above)).value, above);
    ASSERT_EQ(round_to(format, -middle).value, -even);
    ASSERT_EQ(round_to(format, middle).error, even - middle);
    ASSERT_EQ(round_to(format, middle).relative_error, std::abs(even - middle) / middle);
  }
}

TEST_P(SmallFormat, OverflowsFromHalfAStepBeyondItsLargestNumber) {
  const FloatFormat& format = GetParam();
  const double step = format.max() - meaning(format, largest_pattern(format) - 1);
  const double limit = format.max() + step / 2;
  // The step beyond the largest number would be even where the largest is odd. E4M3's largest is even.
  EXPECT_EQ(round_to(format, std::nextafter(limit, 0)).value, format.max());
  EXPECT_EQ(round_to(format, std::nextafter(limit, 0)).verdict, FloatVerdict::Rounding);
  EXPECT_EQ(round_to(format, limit).verdict, format.has_infinity ? FloatVerdict::Overflow : FloatVerdict::Rounding);
  for (const double x : {std::nextafter(limit, Limits::infinity()), Limits::max()}) {
    const auto up = round_to(format, x);
    const auto down = round_to(format, -x);
    EXPECT_EQ(up.verdict, FloatVerdict::Overflow);
    EXPECT_EQ(down.verdict, FloatVerdict::Overflow);
    EXPECT_EQ(packed(format, up.bits), largest_pattern(format) + (format.has_infinity ? 1 : 0));
    EXPECT_EQ(down.bits.sign, 1);
    EXPECT_EQ(up.value, format.has_infinity ? Limits::infinity() : format.max());
    EXPECT_EQ(down.error, format.has_infinity ? -Limits::infinity() : x - format.max());
  }
}

TEST_P(SmallFormat, HasTheLimitsThatItsBitPatternsMean) {
  const FloatFormat& format = GetParam();
  const uint32_t one = static_cast<uint32_t>(format.bias()) << format.fraction_bits;
  EXPECT_EQ(meaning(format, one), 1);
  EXPECT_EQ(format.epsilon(), meaning(format, one + 1) - 1);
  EXPECT_EQ(format.max(), meaning(format, largest_pattern(format)));
  EXPECT_EQ(format.min_subnormal(), meaning(format, 1));
  EXPECT_EQ(format.min_normal(), meaning(format, 1U << format.fraction_bits));
}

TEST_P(SmallFormat, KeepsInfinityAndNanWhereItHasThem) {
  const FloatFormat& format = GetParam();
  const auto infinite = round_to(format, -Limits::infinity());
  EXPECT_EQ(infinite.verdict, format.has_infinity ? FloatVerdict::Exact : FloatVerdict::Overflow);
  EXPECT_EQ(packed(format, infinite.bits),
            (1U << (format.bits() - 1)) | (largest_pattern(format) + (format.has_infinity ? 1 : 0)));
  const auto nan = round_to(format, Limits::quiet_NaN());
  EXPECT_EQ(nan.verdict, FloatVerdict::NotANumber);
  EXPECT_TRUE(std::isnan(nan.value));
  EXPECT_GT(packed(format, nan.bits), largest_pattern(format) + (format.has_infinity ? 1 : 0));
}

TEST(FloatFormats, HaveTheKnownLimits) {
  EXPECT_EQ(kFp16.max(), 65504);
  EXPECT_EQ(kFp8E4m3.max(), 448);
  EXPECT_EQ(kFp8E4m3.min_subnormal(), 1.0 / 512);
  EXPECT_EQ(kFp8E5m2.max(), 57344);
  EXPECT_EQ(kFp8E5m2.min_subnormal(), 1.0 / 65536);
  using Float = std::numeric_limits<float>;
  EXPECT_EQ(kFp32.max(), Float::max());
  EXPECT_EQ(kFp32.min_normal(), Float::min());
  EXPECT_EQ(kFp32.min_subnormal(), Float::denorm_min());
  EXPECT_EQ(kFp32.epsilon(), Float::epsilon());
  EXPECT_EQ(kFp32.digits_to_tell_apart(), Float::max_digits10);
  EXPECT_NEAR(kFp16.decimal_digits(), 3.31, 0.01);
  EXPECT_EQ(kTf32.bits(), 19);
}

TEST(RoundToFp32, IsWhatTheCompilersCastDoes) {
  std::mt19937_64 random(1);
  const auto check = [](double x) {
    const float cast = static_cast<float>(x);
    const auto rounded = round_to(kFp32, x);
    ASSERT_EQ(packed(kFp32, rounded.bits), std::bit_cast<uint32_t>(cast)) << x;
    ASSERT_EQ(rounded.value, cast);
  };
  for (int i = 0; i < 1'000'000; ++i) {
    // Exponents from far below FP32's subnormals to its overflow, so that all verdicts occur.
    const double fraction = 1 + static_cast<double>(random() >> 12) * 0x1p-52;
    const int exponent = static_cast<int>(random() % 290) - 155;
    check(std::ldexp(random() % 2 == 0 ? fraction : -fraction, exponent));
  }
  for (const double x : {0.0, -0.0, 0x1p-150, 0x1.8p-149, 0x1.000001p0, 0x1.000003p0, 0x1.fffffefp127, 0x1.ffffffp127,
                         Limits::denorm_min(), Limits::infinity(), -Limits::infinity(), -Limits::max()}) {
    check(x);
  }
}

TEST(RoundTo, SaysWhatBecameOfANumber) {
  const auto verdict = [](const FloatFormat& format, double x) { return to_string(round_to(format, x).verdict); };
  EXPECT_EQ(verdict(kFp16, 1.5), "exact");
  EXPECT_EQ(verdict(kFp16, 0x1p-24), "exact") << "a subnormal number that lost nothing";
  EXPECT_EQ(verdict(kFp16, 0.00006666666), "rounding");
  EXPECT_EQ(verdict(kFp16, std::nextafter(kFp16.min_normal(), 0)), "rounding") << "up to a normal number";
  EXPECT_EQ(verdict(kFp16, 1e-6), "subnormal");
  EXPECT_EQ(verdict(kFp16, 1e-8), "underflow");
  EXPECT_EQ(verdict(kFp16, 70000), "overflow");
  EXPECT_EQ(verdict(kFp8E4m3, 500), "overflow");
  EXPECT_EQ(verdict(kFp16, Limits::quiet_NaN()), "nan");
}

TEST(RoundTo, AnUnderflowKeepsTheSignAndLosesAll) {
  const auto rounded = round_to(kFp16, -1e-8);
  EXPECT_EQ(rounded.value, 0);
  EXPECT_EQ(packed(kFp16, rounded.bits), 0x8000U);
  EXPECT_EQ(rounded.error, 1e-8);
  EXPECT_EQ(rounded.relative_error, 1);
}

TEST(RoundTo, RoundsOnceWhereACastThroughFloatRoundsTwice) {
  const double x =
      1 + 0x1p-11 + 0x1p-30;  // just above the middle of two numbers of FP16; on it after rounding to float
  EXPECT_EQ(round_to(kFp16, x).value, 1 + 0x1p-10);
  EXPECT_EQ(round_to(kFp16, static_cast<float>(x)).value, 1);
}

}  // namespace
}  // namespace snug::cli::float_format_test
