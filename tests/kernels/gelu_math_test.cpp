// The formulas of bias_gelu's CUDA kernel, on every FP16 number there is, against FP64.

#include "src/kernels/gelu_math.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace snug::kernels::detail::gelu_math_test {
namespace {

constexpr double kSmallestNormal = 0x1p-14;
constexpr double kSmallest = 0x1p-24;      // the spacing of FP16 below kSmallestNormal
constexpr double kHalfRounding = 0x1p-11;  // largest relative error of rounding to FP16, above kSmallestNormal

const double kScale = std::sqrt(2 / std::acos(-1.0));

double exact_argument(double z) { return kScale * (z + 0.044715 * z * z * z); }
double exact_factor(double z) { return 1 / (1 + std::exp(-2 * exact_argument(z))); }
double exact_gelu(double z) { return z * exact_factor(z); }
double exact_derivative(double z) {
  const double slope = 2 * kScale * (1 + 3 * 0.044715 * z * z);
  return exact_factor(z) * (1 + z * exact_factor(-z) * slope);
}

std::vector<Half> finite_halves() {
  std::vector<Half> all;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<uint16_t>(bits)};
    if (std::isfinite(to_float(half))) {
      all.push_back(half);
    }
  }
  return all;
}

/// The largest errors over some inputs.
struct Errors {
  double relative = 0;  ///< |y - exact| / |exact| where |exact| >= 2^-14, FP16's smallest normal number
  double relative_at = 0;
  double spacings = 0;  ///< |y - exact| / 2^-24 elsewhere, where FP16's numbers are 2^-24 apart
  double spacings_at = 0;

  void add(double input, double y, double exact) {
    const bool normal = std::abs(exact) >= kSmallestNormal;
    const double error = std::abs(y - exact) / (normal ? std::abs(exact) : kSmallest);
    double& most = normal ? relative : spacings;
    if (!(error <= most)) {  // a NaN counts as the largest
      most = error;
      (normal ? relative_at : spacings_at) = input;
    }
  }
};

// Another input goes through the other half of the pair, so that a formula that mixes them up is found out.
template <HalfVariant variant>
Errors errors_of(float bias = 0) {
  Errors errors;
  const auto inputs = finite_halves();
  const Half b = to_half(bias);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Half2 y = bias_gelu<variant>(pack(inputs[i], inputs[inputs.size() - 1 - i]), pack(b, b));
    const double x = to_float(inputs[i]);
    const double other = to_float(inputs[inputs.size() - 1 - i]);
    errors.add(x, to_float(lower(y)), exact_gelu(x + to_float(b)));
    errors.add(other, to_float(upper(y)), exact_gelu(other + to_float(b)));
  }
  return errors;
}

TEST(HalfConversion, GivesEveryNumberBackThatItMade) {
  for (const Half half : finite_halves()) {
    ASSERT_EQ(to_half(to_float(half)).bits, half.bits);
  }
  EXPECT_EQ(to_float(Half{0x3c00}), 1.0F);
  EXPECT_EQ(to_float(Half{0xc000}), -2.0F);
  EXPECT_EQ(to_float(Half{0x7bff}), 65504.0F);
  EXPECT_EQ(to_float(Half{0x0001}), 0x1p-24F);
  EXPECT_EQ(to_float(Half{0xfc00}), -INFINITY);
  EXPECT_TRUE(std::isnan(to_float(Half{0x7e00})));
}

// Between two neighbours all rounding turns on the number in the middle, so three numbers stand for all.
TEST(HalfConversion, RoundsToTheNearestAndToTheEvenOneOfTwo) {
  for (uint16_t bits = 0; bits < 0x7bff; ++bits) {
    const float middle = (to_float(Half{bits}) + to_float(Half{static_cast<uint16_t>(bits + 1)})) / 2;
    const uint16_t even = bits % 2 == 0 ? bits : static_cast<uint16_t>(bits + 1);
    ASSERT_EQ(to_half(std::nextafter(middle, 0.0F)).bits, bits);
    ASSERT_EQ(to_half(middle).bits, even);
    ASSERT_EQ(to_half(std::nextafter(middle, INFINITY)).bits, bits + 1);
    ASSERT_EQ(to_half(-middle).bits, even | 0x8000);
  }
}

TEST(HalfConversion, BecomesInfiniteFromHalfwayToTheNextPowerOfTwo) {
  EXPECT_EQ(to_half(std::nextafter(65520.0F, 0.0F)).bits, 0x7bff);
  EXPECT_EQ(to_half(65520.0F).bits, 0x7c00);
  EXPECT_EQ(to_half(-1e30F).bits, 0xfc00);
  EXPECT_EQ(to_half(INFINITY).bits, 0x7c00);
  EXPECT_TRUE(std::isnan(to_float(to_half(NAN))));
}

TEST(GeluMath, ReferenceIsTheFormulaWithTheTanh) {
  for (double z = -12; z < 12; z += 1.0 / 64) {
    EXPECT_NEAR(exact_gelu(z), z / 2 * (1 + std::tanh(exact_argument(z))), 1e-15 * std::abs(z));
    const double h = 1e-5;
    EXPECT_NEAR(exact_derivative(z), (exact_gelu(z + h) - exact_gelu(z - h)) / (2 * h), 1e-9);
  }
}

// No error is larger than that of rounding the exact result: FP32 with exp is as good as FP16 can be.
TEST(GeluMath, InFloatWithExpIsRoundedOnlyOnce) {
  const Errors errors = errors_of<HalfVariant::kFloat>();
  EXPECT_LE(errors.relative, kHalfRounding);
  EXPECT_NEAR(errors.relative, 4.8766e-4, 1e-8);
  EXPECT_EQ(errors.relative_at, -0x1.20cp-3);
  EXPECT_LE(errors.spacings, 0.5 + 1e-6);
}

// 1 + tanh(u) loses digits near tanh = -1: at -3.98 it is 4e-5, which FP32 has to within 2^-25, so to 8e-4, and the
// store adds its 5e-4.
TEST(GeluMath, InFloatWithTanhIsTwiceAsFarOffBeforeMinusFour) {
  const Errors errors = errors_of<HalfVariant::kFloatTanh>();
  EXPECT_NEAR(errors.relative, 9.9479e-4, 1e-8);
  EXPECT_EQ(errors.relative_at, -3.982421875);
  EXPECT_NEAR(errors.spacings, 1.69577, 1e-5);
  EXPECT_EQ(errors.spacings_at, -5.15625);
}

// The cube is rounded twice and multiplied by about 2 z in the exponent; then the factor and the product are rounded.
TEST(GeluMath, InPackedHalvesWithTanhInFloatIsFiveAndAHalfTimesAsFarOff) {
  const Errors errors = errors_of<HalfVariant::kHalf2>();
  EXPECT_NEAR(errors.relative, 2.74097e-3, 1e-8);
  EXPECT_EQ(errors.relative_at, -3.970703125);
  EXPECT_NEAR(errors.spacings, 6.36464, 1e-5);
  EXPECT_EQ(errors.spacings_at, -4.0625);
}

// In FP16 tanh is -1 from -3.586 on, where gelu is still -4.4e-4: all of the result is lost.
TEST(GeluMath, InPackedHalvesWithTheirTanhLosesTheWholeResult) {
  EXPECT_EQ(errors_of<HalfVariant::kHalf2Tanh>().relative, 1);
  const auto at = [](float x) { return to_float(lower(bias_gelu<HalfVariant::kHalf2Tanh>(both(x), both(0)))); };
  EXPECT_NE(at(-3.583984375F), 0);
  EXPECT_EQ(at(-3.5859375F), 0);
  EXPECT_GT(std::abs(exact_gelu(-3.5859375)), 7 * kSmallestNormal);
}

TEST(GeluMath, AddsTheBiasInFloatWhichHalvesCannot) {
  for (const float bias : {0.1F, -1.7F, 3.3F, -500.0F, -6e4F}) {
    SCOPED_TRACE(bias);
    const Errors in_float = errors_of<HalfVariant::kFloat>(bias);
    EXPECT_LE(in_float.relative, kHalfRounding * 1.01);
    EXPECT_LE(in_float.spacings, 0.5 + 1e-3);
  }
  // In FP16 the sum is rounded, which the slope of log(gelu) multiplies in the tail.
  EXPECT_GT(errors_of<HalfVariant::kHalf2>(-1.7F).relative, 10 * kHalfRounding);
}

TEST(GeluMath, DerivativeInFloatIsWithinThreeRoundingsOfFloat) {
  double most = 0;
  for (const Half half : finite_halves()) {
    const float z = to_float(half);
    most = std::max(most, std::abs(gelu_derivative(z) - exact_derivative(z)));
  }
  EXPECT_LE(most, 3 * 0x1p-24);  // its largest value is 1.13
}

TEST(GeluMath, DerivativeRoundedToHalfIsRoundedOnlyOnceButAtItsRoot) {
  Errors errors;
  for (const Half half : finite_halves()) {
    const double z = to_float(half);
    errors.add(z, to_float(to_half(gelu_derivative(to_float(half)))), exact_derivative(z));
  }
  EXPECT_LE(errors.relative,
            kHalfRounding * 1.2);  // next to the root, at -0.7518, 1e-7 is left of a difference of two numbers
  EXPECT_LE(errors.spacings, 0.6);
}

// BF16 reaches as far as FP32. The error grows with the exponent, up to 87, whose rounding exp makes a relative error.
TEST(GeluMath, HoldsForEveryBFloat16WhoseResultFloatCanHold) {
  double most = 0;
  int64_t inputs = 0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto z = std::bit_cast<float>(bits << 16);
    const double exact = exact_gelu(z);
    if (std::isfinite(z) && std::abs(exact) >= std::numeric_limits<float>::min()) {
      most = std::max(most, std::abs(gelu(z) - exact) / std::abs(exact));
      ++inputs;
    }
  }
  EXPECT_LE(most, 2 * 88 * 0x1p-24);
  EXPECT_GT(inputs, 48000);
}

TEST(GeluMath, KeepsZerosAndInfinitiesAsTorchDoes) {
  EXPECT_TRUE(std::signbit(gelu(-0.0F)));
  EXPECT_EQ(gelu(INFINITY), INFINITY);
  EXPECT_TRUE(std::isnan(gelu(-INFINITY)));  // the limit is 0, but torch's formula gives infinity times zero, too
  EXPECT_TRUE(std::isnan(gelu(NAN)));
  EXPECT_EQ(gelu(-1e30F), 0.0F);
  EXPECT_EQ(gelu(1e30F), 1e30F);
  EXPECT_EQ(gelu_derivative(0.0F), 0.5F);
  EXPECT_EQ(gelu_derivative(65504.0F), 1.0F);
  EXPECT_EQ(gelu_derivative(-65504.0F), 0.0F);
  EXPECT_TRUE(std::isnan(gelu_derivative(NAN)));
}

}  // namespace
}  // namespace snug::kernels::detail::gelu_math_test
