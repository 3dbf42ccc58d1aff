#include "snug/kernels/detail/compact_adamw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "snug/kernels/detail/simd_targets.h"

namespace snug::kernels::compact_adamw_test {
namespace {

/// Each test runs with every instruction set that this processor has.
class OnEachTarget : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::use_simd_target(GetParam()); }
  void TearDown() override { detail::use_simd_target(""); }
};
class SplitWeights : public OnEachTarget {};
class CompactAdamWKernel : public OnEachTarget {};
const auto name_of = [](const auto& target) { return target.param; };
INSTANTIATE_TEST_SUITE_P(, SplitWeights, ::testing::ValuesIn(detail::simd_targets()), name_of);
INSTANTIATE_TEST_SUITE_P(, CompactAdamWKernel, ::testing::ValuesIn(detail::simd_targets()), name_of);

struct Split {
  explicit Split(const std::vector<float>& weights) : rounded(weights.size()), correction(weights.size()) {
    split_weights(weights.data(), rounded.data(), correction.data(), static_cast<int64_t>(weights.size()));
  }
  std::vector<float> joined() const {
    std::vector<float> weights(rounded.size());
    join_weights(rounded.data(), correction.data(), weights.data(), static_cast<int64_t>(weights.size()));
    return weights;
  }
  std::vector<BFloat16> rounded;
  std::vector<int8_t> correction;
};

float value_of(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

/// Of every exponent, both signs.
std::vector<float> many_numbers() {
  std::mt19937 random(1);
  std::vector<float> numbers;
  for (uint32_t i = 0; i < 100'003; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random());
    if ((bits & 0x7F800000) < 0x7F000000) {
      numbers.push_back(std::bit_cast<float>(bits));
    }
  }
  return numbers;
}

TEST_P(SplitWeights, KeepTheUpper24BitsRoundedToNearest) {
  const std::vector<float> numbers = many_numbers();
  const Split split(numbers);
  const std::vector<float> joined = split.joined();
  for (size_t i = 0; i < numbers.size(); ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(numbers[i]);
    EXPECT_EQ(std::bit_cast<uint32_t>(joined[i]), (bits + 0x80) & 0xFFFFFF00) << numbers[i];
  }
  const Split again(joined);
  EXPECT_EQ(again.joined(), joined) << "what has 24 bits is kept";
  EXPECT_EQ(again.correction, split.correction);
}

TEST_P(SplitWeights, TheBf16PartIsTheNearest) {
  const std::vector<float> numbers = many_numbers();
  const Split split(numbers);
  const std::vector<float> joined = split.joined();
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double distance = std::abs(double{value_of(split.rounded[i])} - double{joined[i]});
    for (const int to : {-1, 1}) {
      const BFloat16 neighbour{static_cast<uint16_t>(split.rounded[i].bits + to)};
      if ((split.rounded[i].bits & 0x7FFF) != 0 || to > 0) {
        EXPECT_LE(distance, std::abs(double{value_of(neighbour)} - double{joined[i]})) << numbers[i];
      }
    }
  }
}

TEST_P(SplitWeights, ACorrectionOfZeroBelongsToABf16Number) {
  const std::vector<float> numbers{0.0f, -0.0f, 1.0f, -1.5f, 0x1p-126f, 0x1p-133f, INFINITY, -INFINITY};
  const Split split(numbers);
  EXPECT_THAT(split.correction, ::testing::Each(0));
  EXPECT_EQ(split.joined(), numbers);
}

TEST_P(SplitWeights, NaNStaysNaNAndLargeNumbersStayFinite) {
  const std::vector<float> numbers{NAN, std::bit_cast<float>(0x7FFFFFFFu), std::bit_cast<float>(0xFFFFFFFFu),
                                   std::bit_cast<float>(0x7F800001u), 3.4e38f};
  const Split split(numbers);
  const std::vector<float> joined = split.joined();
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(std::isnan(joined[i])) << i;
    EXPECT_TRUE(std::isnan(value_of(split.rounded[i]))) << i;
  }
  EXPECT_TRUE(std::isinf(value_of(split.rounded[4]))) << "as BF16 rounds it";
  EXPECT_NEAR(joined[4] / 3.4e38f, 1, 1e-5);
}

TEST_P(SplitWeights, AReplacedBf16PartIsMovedByHalfAUnitAtMost) {
  for (const float replaced : {0.0f, -0.0f, 0x1p-133f, 1.0f, -3.0f}) {
    Split split(std::vector<float>(256, replaced));
    const float unit = value_of(BFloat16{static_cast<uint16_t>(split.rounded[0].bits + 1)}) - replaced;
    for (int c = -128; c < 128; ++c) {
      split.correction[static_cast<size_t>(c + 128)] = static_cast<int8_t>(c);
    }
    for (const float weight : split.joined()) {
      EXPECT_LE(std::abs(weight - replaced), std::abs(unit) / 2) << replaced;
      EXPECT_EQ(std::signbit(weight), std::signbit(replaced));
    }
  }
}

std::vector<float> expanded1(const std::vector<int8_t>& codes, const std::vector<float>& scales) {
  std::vector<float> m(codes.size());
  expand_exp_avg(codes.data(), scales.data(), m.data(), static_cast<int64_t>(m.size()));
  return m;
}

std::vector<float> expanded2(const std::vector<uint8_t>& codes, const std::vector<float>& scales) {
  std::vector<float> v(codes.size());
  expand_exp_avg_sq(codes.data(), scales.data(), v.data(), static_cast<int64_t>(v.size()));
  return v;
}

struct Companded {
  Companded(const std::vector<float>& exp_avg, const std::vector<float>& exp_avg_sq)
      : m(exp_avg.size()),
        v(exp_avg.size()),
        m_scale(static_cast<size_t>(companding_blocks(static_cast<int64_t>(m.size())))),
        v_scale(m_scale.size()) {
    compand_exp_avg(exp_avg.data(), m.data(), m_scale.data(), static_cast<int64_t>(m.size()));
    compand_exp_avg_sq(exp_avg_sq.data(), v.data(), v_scale.data(), static_cast<int64_t>(v.size()));
  }
  std::vector<int8_t> m;
  std::vector<uint8_t> v;
  std::vector<float> m_scale;
  std::vector<float> v_scale;
};

TEST_P(CompactAdamWKernel, ItsCodesAreTheCompandingFunctionsOfThePaper) {
  // -1 to 1 and 0 to 1 in 63 steps, with 1 in each block.
  std::vector<float> x(64);
  std::vector<float> y(64);
  for (size_t i = 0; i < 64; ++i) {
    x[i] = 1 - static_cast<float>(i) / 31.5f;
    y[i] = std::pow(static_cast<float>(i) / 63, 2.0f);
  }
  const Companded codes(x, y);
  EXPECT_EQ(codes.m_scale[0], 1);
  EXPECT_EQ(codes.v_scale[0], 1);
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_NEAR(codes.m[i], 127 * 2 * x[i] / (1 + std::abs(x[i])), 0.5001) << x[i];
    EXPECT_NEAR(codes.v[i], 255 * std::sqrt(y[i]), 0.5001) << y[i];
  }
  const std::vector<float> m = expanded1(codes.m, codes.m_scale);
  const std::vector<float> v = expanded2(codes.v, codes.v_scale);
  for (size_t i = 0; i < 64; ++i) {
    const float z = static_cast<float>(codes.m[i]) / 127;
    EXPECT_NEAR(m[i], z / (2 - std::abs(z)), 1e-6);
    EXPECT_NEAR(v[i], std::pow(static_cast<float>(codes.v[i]) / 255, 2.0f), 1e-6);
  }
}

TEST_P(CompactAdamWKernel, AnExpandedMomentKeepsItsCode) {
  std::vector<int8_t> m;
  std::vector<uint8_t> v;
  for (int i = -127; i <= 127; ++i) {
    if (m.size() % 64 == 0) {  // the largest of each block
      m.push_back(127);
      v.push_back(255);
    }
    m.push_back(static_cast<int8_t>(i));
    v.push_back(static_cast<uint8_t>(i + 127));
  }
  const std::vector<float> scales(5, 0.37f);
  const Companded again(expanded1(m, scales), expanded2(v, scales));
  EXPECT_EQ(again.m, m);
  EXPECT_EQ(again.v, v);
}

TEST_P(CompactAdamWKernel, OnlyAZeroSecondMomentBecomesZero) {
  const Companded codes({0, 0, 0, 0, 0}, {0.0f, 1e-38f, 1e-12f, 1e-7f, 1.0f});
  EXPECT_THAT(codes.v, ::testing::ElementsAre(0, 1, 1, 1, 255));
}

TEST_P(CompactAdamWKernel, BlocksOfZerosAndOfExtremesStayFinite) {
  for (const float largest : {0.0f, 1e-45f, 1e-38f, 1e-36f, 1.0f, 1.3e36f}) {
    const std::vector<float> values(100, largest);
    const Companded codes(values, values);
    const float tolerance = largest > 1e-37f ? 1e-6f * largest : largest;
    EXPECT_THAT(expanded1(codes.m, codes.m_scale), ::testing::Each(::testing::FloatNear(largest, tolerance)));
    EXPECT_THAT(expanded2(codes.v, codes.v_scale), ::testing::Each(::testing::FloatNear(largest, 1e-5f * largest)));
  }
}

/// A tensor and its optimizer state, with some more elements behind that must not change.
struct State {
  explicit State(int64_t count)
      : n(static_cast<size_t>(count)), blocks(static_cast<size_t>(companding_blocks(count))), p({}), g({}) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> weights(n), gradients(n), m_values(n), v_values(n);
    std::generate(weights.begin(), weights.end(), [&] { return normal(random); });
    std::generate(gradients.begin(), gradients.end(),
                  [&] { return normal(random) * std::pow(10.0f, normal(random) - 3); });
    std::generate(m_values.begin(), m_values.end(), [&] { return normal(random) * 1e-3f; });
    std::generate(v_values.begin(), v_values.end(), [&] { return std::pow(normal(random) * 1e-3f, 2.0f); });
    p = Split(weights);
    g = Split(gradients);
    const Companded moments(m_values, v_values);
    m = moments.m, v = moments.v, m_scale = moments.m_scale, v_scale = moments.v_scale;
    for (size_t i = 0; i < 8; ++i) {
      p.rounded.push_back({7});
      p.correction.push_back(7);
      g.rounded.push_back({7});
      m.push_back(7);
      v.push_back(7);
    }
    m_scale.push_back(7);
    v_scale.push_back(7);
  }
  void update(const AdamWStep& step, int64_t begin, int64_t end) {
    const CompactAdamWTensors whole{p.rounded.data(), p.correction.data(), g.rounded.data(), m.data(),
                                    v.data(),         m_scale.data(),      v_scale.data()};
    compact_adamw_update(step, whole.from(begin), end - begin);
  }
  std::vector<uint16_t> bits() const {
    std::vector<uint16_t> bits;
    for (const BFloat16 x : p.rounded) {
      bits.push_back(x.bits);
    }
    return bits;
  }
  void expect_same(const State& other) const {
    EXPECT_EQ(bits(), other.bits());
    EXPECT_EQ(p.correction, other.p.correction);
    EXPECT_EQ(m, other.m);
    EXPECT_EQ(v, other.v);
    EXPECT_EQ(m_scale, other.m_scale);
    EXPECT_EQ(v_scale, other.v_scale);
  }

  size_t n;
  size_t blocks;
  Split p;
  Split g;
  std::vector<int8_t> m;
  std::vector<uint8_t> v;
  std::vector<float> m_scale;
  std::vector<float> v_scale;
};

constexpr AdamWStep kStep{.lr = 0.01,
                          .beta1 = 0.8,
                          .beta2 = 0.99,
                          .eps = 1e-8,
                          .weight_decay = 0.1,
                          .bias_correction1 = 0.6,
                          .bias_correction2 = 0.3,
                          .inverse_scale = 0.125f};

TEST_P(CompactAdamWKernel, AStepIsThatOfAdamWOnTheJoinedWeightsAndExpandedMoments) {
  for (const int64_t count : {1, 63, 64, 65, 128, 1000, 5000}) {
    State state(count);
    const State before = state;
    const std::vector<float> p_before = before.p.joined();
    const std::vector<float> m_before = expanded1(before.m, before.m_scale);
    const std::vector<float> v_before = expanded2(before.v, before.v_scale);
    state.update(kStep, 0, count);
    const std::vector<float> p_after = state.p.joined();
    std::vector<float> m(before.n);
    std::vector<float> v(before.n);
    for (size_t i = 0; i < before.n; ++i) {
      const double g = double{value_of(before.g.rounded[i])} * 0.125;
      const double m_exact = 0.8 * m_before[i] + 0.2 * g;
      const double v_exact = 0.99 * v_before[i] + 0.01 * g * g;
      const double p = p_before[i] * (1 - 0.01 * 0.1) - 0.01 / 0.6 * m_exact / (std::sqrt(v_exact / 0.3) + 1e-8);
      EXPECT_NEAR(p_after[i], p, std::abs(p) * 0x1p-16 + 1e-6 * std::max(1.0, std::abs(p))) << i << " of " << count;
      m[i] = static_cast<float>(m_exact);
      v[i] = static_cast<float>(v_exact);
    }
    const Companded expected(m, v);
    for (size_t i = 0; i < before.n; ++i) {  // a difference in the last bit may fall to the other side of a middle
      EXPECT_NEAR(state.m[i], expected.m[i], 1) << i;
      EXPECT_NEAR(state.v[i], expected.v[i], 1) << i;
    }
    for (size_t i = 0; i < before.blocks; ++i) {
      EXPECT_NEAR(state.m_scale[i], expected.m_scale[i], 1e-6f * expected.m_scale[i]);
      EXPECT_NEAR(state.v_scale[i], expected.v_scale[i], 1e-6f * expected.v_scale[i]);
    }
    for (size_t i = before.n; i < before.n + 8; ++i) {
      EXPECT_EQ(state.p.rounded[i].bits + state.p.correction[i] + state.m[i] + state.v[i], 28) << "behind the end";
    }
    EXPECT_EQ(state.m_scale.back() + state.v_scale.back(), 14) << "behind the end";
  }
}

TEST_P(CompactAdamWKernel, PartsThatBeginAtABlockGiveTheSameBitsAsTheWhole) {
  State whole(1000);
  State parts(1000);
  whole.update(kStep, 0, 1000);
  parts.update(kStep, 640, 1000);
  parts.update(kStep, 64, 640);
  parts.update(kStep, 0, 64);
  parts.expect_same(whole);
}

TEST_P(CompactAdamWKernel, StateOfZeroBytesIsAZeroMoment) {
  State state(300);
  std::fill(state.m.begin(), state.m.end(), int8_t{0});
  std::fill(state.v.begin(), state.v.end(), uint8_t{0});
  std::fill(state.m_scale.begin(), state.m_scale.end(), 0.0f);
  std::fill(state.v_scale.begin(), state.v_scale.end(), 0.0f);
  const std::vector<float> before = state.p.joined();
  const AdamWStep first{.lr = 0.01, .weight_decay = 0, .bias_correction1 = 0.1, .bias_correction2 = 0.001};
  state.update(first, 0, 300);
  const std::vector<float> after = state.p.joined();
  for (size_t i = 0; i < 300; ++i) {
    const float g = value_of(state.g.rounded[i]);
    EXPECT_NEAR(before[i] - after[i], 0.01f * g / (std::abs(g) + 1e-8f), std::abs(after[i]) * 0x1p-16f + 1e-6f);
  }
}

TEST_P(CompactAdamWKernel, WhatNeverHadAGradientOnlyDecays) {
  State state(128);
  std::fill(state.m.begin(), state.m.end(), int8_t{0});
  std::fill(state.v.begin(), state.v.end(), uint8_t{0});
  std::fill(state.g.rounded.begin(), state.g.rounded.begin() + 100, BFloat16{0});  // a whole block, and one in part
  const std::vector<float> before = state.p.joined();
  state.update(kStep, 0, 128);
  const std::vector<float> after = state.p.joined();
  for (size_t i = 0; i < 100; ++i) {
    EXPECT_NEAR(after[i], before[i] * (1 - 0.01 * 0.1), std::abs(before[i]) * 0x1.1p-16) << i;
    EXPECT_EQ(state.m[i], 0) << i;
    EXPECT_EQ(state.v[i], 0) << i;
  }
  EXPECT_EQ(state.v_scale[0], 0);
  EXPECT_GT(state.v_scale[1], 0);
}

TEST_P(CompactAdamWKernel, ALearningRateOfZeroMovesTheMomentsAlone) {
  State state(700);
  const State before = state;
  AdamWStep step = kStep;
  step.lr = 0;
  state.update(step, 0, 700);
  EXPECT_EQ(state.bits(), before.bits());
  EXPECT_EQ(state.p.correction, before.p.correction);
  EXPECT_NE(state.m, before.m);
  EXPECT_NE(state.v, before.v);
}

TEST_P(CompactAdamWKernel, StepsBelowBf16sResolutionCount) {
  State state(64);
  state.p = Split(std::vector<float>(64, 1.0f));
  state.g = Split(std::vector<float>(64, 1.0f));
  std::fill(state.m.begin(), state.m.end(), int8_t{0});
  std::fill(state.v.begin(), state.v.end(), uint8_t{0});
  for (int i = 1; i <= 100; ++i) {  // each step is a tenth of what BF16 could show
    state.update({.lr = 1e-4,
                  .weight_decay = 0,
                  .bias_correction1 = 1 - std::pow(0.9, i),
                  .bias_correction2 = 1 - std::pow(0.999, i)},
                 0, 64);
  }
  EXPECT_NEAR(value_of(state.p.rounded[5]), 0.99, 0.003);
  EXPECT_NEAR(state.p.joined()[5], 0.99, 1e-3) << "rounding to 24 bits may move each step by 7 %";
}

/// An element whose gradient is 4,000 times smaller than another's in its block, and then ends: how far it goes in
/// steps of lr.
double way_of_a_small_gradient() {
  State state(64);
  state.p = Split(std::vector<float>(64, 0.0f));
  std::fill(state.m.begin(), state.m.end(), int8_t{0});
  std::fill(state.v.begin(), state.v.end(), uint8_t{0});
  for (int i = 1; i <= 50; ++i) {
    std::vector<float> g(64, 1);
    g[5] = i <= 30 ? 2.5e-4f : 0;
    state.g = Split(g);
    state.update({.lr = 1e-3,
                  .weight_decay = 0,
                  .bias_correction1 = 1 - std::pow(0.9, i),
                  .bias_correction2 = 1 - std::pow(0.999, i)},
                 0, 64);
  }
  return std::abs(state.p.joined()[5]) / 1e-3;
}

TEST_P(CompactAdamWKernel, AGradientThatIsSmallInItsBlockDoesNotLeapWhenItEnds) {
  // In FP32 it goes 39 steps of lr.
  EXPECT_LT(way_of_a_small_gradient(), 39);
  EXPECT_GT(way_of_a_small_gradient(), 0);
}

}  // namespace
}  // namespace snug::kernels::compact_adamw_test
