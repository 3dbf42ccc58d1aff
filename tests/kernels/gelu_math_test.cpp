// The formulas of bias_gelu's CUDA kernel, on every FP16 number there is, against FP64.

#include "src/kernels/gelu_math.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kernels/conversions.h"

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

float rounded_to_half(float value) {
  Float16 half;
  round_to_nearest(&value, &half, 1);
  widen(&half, &value, 1);
  return value;
}

std::vector<float> finite_halves() {
  std::vector<float> all;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    float value = 0;
    widen(&half, &value, 1);
    if (std::isfinite(value)) {
      all.push_back(value);
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

Errors errors_of(float bias = 0) {
  Errors errors;
  const float b = rounded_to_half(bias);
  for (const float x : finite_halves()) {
    errors.add(x, rounded_to_half(gelu(x + b)), exact_gelu(x + b));
  }
  return errors;
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
  const Errors errors = errors_of();
  EXPECT_LE(errors.relative, kHalfRounding);
  EXPECT_NEAR(errors.relative, 4.8766e-4, 1e-8);
  EXPECT_EQ(errors.relative_at, -0x1.20cp-3);
  EXPECT_LE(errors.spacings, 0.5 + 1e-6);
}

TEST(GeluMath, AddsTheBiasInFloat) {
  for (const float bias : {0.1F, -1.7F, 3.3F, -500.0F, -6e4F}) {
    SCOPED_TRACE(bias);
    const Errors in_float = errors_of(bias);
    EXPECT_LE(in_float.relative, kHalfRounding * 1.01);
    EXPECT_LE(in_float.spacings, 0.5 + 1e-3);
  }
}

TEST(GeluMath, DerivativeInFloatIsWithinThreeRoundingsOfFloat) {
  double most = 0;
  for (const float z : finite_halves()) {
    most = std::max(most, std::abs(gelu_derivative(z) - exact_derivative(z)));
  }
  EXPECT_LE(most, 3 * 0x1p-24);  // its largest value is 1.13
}

TEST(GeluMath, DerivativeRoundedToHalfIsRoundedOnlyOnceButAtItsRoot) {
  Errors errors;
  for (const float z : finite_halves()) {
    errors.add(z, rounded_to_half(gelu_derivative(z)), exact_derivative(z));
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
