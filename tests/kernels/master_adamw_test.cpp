#include "src/kernels/master_adamw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tests/kernels/conversions.h"
#include "tests/support/simd_targets.h"

namespace snug::kernels::master_adamw_test {
namespace {

/// Each test runs with every instruction set that this processor has.
class MasterAdamW : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::use_simd_target(GetParam()); }
  void TearDown() override { detail::use_simd_target(""); }
};
INSTANTIATE_TEST_SUITE_P(, MasterAdamW, ::testing::ValuesIn(detail::simd_targets()),
                         [](const auto& target) { return target.param; });

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// What bits mean, from the definition of the formats: sign, exponent, fraction.
double value_of(uint16_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int exponent = (bits & 0x7FFF) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  double value = exponent == 0 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                               : std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
  if (exponent == (1 << exponent_bits) - 1) {
    value = fraction == 0 ? kInfinity : kNaN;
  }
  return bits >> 15 ? -value : value;
}
double value_of(Float16 half) { return value_of(half.bits, 5); }
double value_of(BFloat16 half) { return value_of(half.bits, 8); }

template <class Half>
std::vector<uint16_t> rounded(const std::vector<float>& values) {
  std::vector<Half> halves(values.size());
  round_to_nearest(values.data(), halves.data(), static_cast<int64_t>(values.size()));
  std::vector<uint16_t> bits;
  std::transform(halves.begin(), halves.end(), std::back_inserter(bits), [](Half half) { return half.bits; });
  return bits;
}

template <class Half>
std::vector<float> widened(const std::vector<Half>& halves) {
  std::vector<float> values(halves.size());
  widen(halves.data(), values.data(), static_cast<int64_t>(halves.size()));
  return values;
}

template <class Half>
void expect_exact_conversions(uint16_t infinity) {
  std::vector<Half> all(65536);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].bits = static_cast<uint16_t>(i);
  }
  const std::vector<float> values = widened(all);
  const std::vector<uint16_t> back = rounded<Half>(values);
  for (size_t i = 0; i < all.size(); ++i) {
    if ((i & 0x7FFF) > infinity) {
      EXPECT_TRUE(std::isnan(values[i])) << i;
      EXPECT_GT(back[i] & 0x7FFF, infinity) << i;
    } else {
      EXPECT_EQ(values[i], value_of(all[i])) << i;
      EXPECT_EQ(std::signbit(values[i]), i >= 0x8000) << i;
      EXPECT_EQ(back[i], i);
    }
  }
  // Between neighbours: below the middle down, in the middle to the even one, above it up.
  for (uint16_t low = 0; low + 1 < infinity; ++low) {
    const double sum = value_of(Half{low}) + value_of(Half{static_cast<uint16_t>(low + 1)});
    const auto middle = static_cast<float>(sum / 2);
    const uint16_t even = low % 2 == 0 ? low : static_cast<uint16_t>(low + 1);
    const auto minus = [](uint16_t bits) { return static_cast<uint16_t>(bits | 0x8000); };
    EXPECT_THAT(rounded<Half>({std::nextafter(middle, 0.0f), middle, std::nextafter(middle, kInfinity), -middle}),
                testing::ElementsAre(low, even, low + 1, minus(even)));
  }
}

TEST_P(MasterAdamW, AllHalvesAreReadAndWrittenExactlyAndTiesGoToEven) {
  expect_exact_conversions<Float16>(0x7C00);
  expect_exact_conversions<BFloat16>(0x7F80);
}

TEST_P(MasterAdamW, WhatIsTooLargeForAHalfBecomesInfinity) {
  EXPECT_THAT(rounded<Float16>({65519.0f, 65520.0f, -1e30f, kInfinity, 2e-8f, 3e-8f}),
              testing::ElementsAre(0x7BFF, 0x7C00, 0xFC00, 0x7C00, 0, 1));
  EXPECT_THAT(rounded<BFloat16>({3.3895e38f, 3.4e38f, -kInfinity}), testing::ElementsAre(0x7F7F, 0x7F80, 0xFF80));
  // A NaN of which only low bits are set.
  const auto odd_nan = std::bit_cast<float>(0x7FFFFFFFu);
  EXPECT_THAT(rounded<BFloat16>({odd_nan, std::bit_cast<float>(0x7F800001u)}), testing::Each(testing::Gt(0x7F80)));
}

constexpr AdamWStep kStep{.lr = 0.01,
                          .beta1 = 0.8,
                          .beta2 = 0.99,
                          .eps = 1e-8,
                          .weight_decay = 0.1,
                          .bias_correction1 = 0.6,
                          .bias_correction2 = 0.3,
                          .inverse_scale = 0.125f};

struct Moments {
  std::vector<float> p;
  std::vector<float> m;
  std::vector<float> v;
};

Moments random_moments(size_t count) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  Moments state{std::vector<float>(count), std::vector<float>(count), std::vector<float>(count)};
  std::generate(state.p.begin(), state.p.end(), [&] { return normal(random); });
  std::generate(state.m.begin(), state.m.end(), [&] { return normal(random) * 1e-2f; });
  std::generate(state.v.begin(), state.v.end(), [&] { return std::pow(normal(random) * 1e-2f, 2.0f); });
  return state;
}

template <class Half>
std::vector<Half> random_gradient(size_t count) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  std::vector<Half> halves(count);
  round_to_nearest(values.data(), halves.data(), static_cast<int64_t>(count));
  return halves;
}

template <class Half>
void expect_adamw_step() {
  for (const size_t count : {1u, 7u, 16u, 33u, 1000u}) {
    // Some elements behind the end must not change.
    Moments state = random_moments(count + 8);
    const Moments before = state;
    const std::vector<Half> g = random_gradient<Half>(count);
    std::vector<Half> parameter(count + 8, Half{0x1234});
    master_adamw_update(kStep, state.p.data(), parameter.data(), g.data(), state.m.data(), state.v.data(),
                        static_cast<int64_t>(count));
    for (size_t i = 0; i < count; ++i) {
      const double gradient = value_of(g[i]) * 0.125;
      const double m = 0.8 * before.m[i] + 0.2 * gradient;
      const double v = 0.99 * before.v[i] + 0.01 * gradient * gradient;
      const double p = before.p[i] * (1 - 0.01 * 0.1) - 0.01 / 0.6 * m / (std::sqrt(v / 0.3) + 1e-8);
      EXPECT_NEAR(state.m[i], m, 1e-7 * (std::abs(before.m[i]) + std::abs(gradient)));
      EXPECT_NEAR(state.v[i], v, 4e-7 * v);
      EXPECT_NEAR(state.p[i], p, 4e-7 * std::max(1.0, std::abs(p)));
    }
    const std::vector<uint16_t> expected = rounded<Half>(state.p);
    for (size_t i = 0; i < count + 8; ++i) {
      EXPECT_EQ(parameter[i].bits, i < count ? expected[i] : 0x1234) << i << " of " << count;
      EXPECT_TRUE(i < count || (state.p[i] == before.p[i] && state.m[i] == before.m[i] && state.v[i] == before.v[i]));
    }
  }
}

TEST_P(MasterAdamW, AStepIsAdamWOnTheMastersAndTheParameterIsTheirRounding) {
  expect_adamw_step<Float16>();
  expect_adamw_step<BFloat16>();
}

TEST_P(MasterAdamW, ALowBeta1InterpolatesFromTheOtherEnd) {
  for (const double beta1 : {0.0, 0.3, 0.5, 0.7}) {
    float p = 1;
    float m = 0.25f;
    float v = 1;
    BFloat16 parameter{};
    const BFloat16 g{0x4040};  // 3
    master_adamw_update({.beta1 = beta1}, &p, &parameter, &g, &m, &v, 1);
    EXPECT_FLOAT_EQ(m, static_cast<float>(beta1 * 0.25 + (1 - beta1) * 3));
  }
}

TEST_P(MasterAdamW, PartsGiveTheSameBitsAsTheWhole) {
  Moments whole = random_moments(1000);
  Moments parts = whole;
  const std::vector<Float16> g = random_gradient<Float16>(1000);
  std::vector<Float16> parameter(1000);
  master_adamw_update(kStep, whole.p.data(), parameter.data(), g.data(), whole.m.data(), whole.v.data(), 1000);
  for (const auto& [begin, end] : {std::pair{0, 3}, {3, 500}, {500, 1000}}) {
    master_adamw_update(kStep, parts.p.data() + begin, parameter.data() + begin, g.data() + begin,
                        parts.m.data() + begin, parts.v.data() + begin, end - begin);
  }
  EXPECT_EQ(whole.p, parts.p);
  EXPECT_EQ(whole.m, parts.m);
  EXPECT_EQ(whole.v, parts.v);
}

}  // namespace
}  // namespace snug::kernels::master_adamw_test
