#include "src/kernels/quantized_adamw.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tests/kernels/conversions.h"
#include "tests/kernels/split_weights.h"
#include "tests/support/simd_targets.h"

namespace snug::kernels::quantized_adamw_test {
namespace {

/// Each test runs with every instruction set that this processor has.
class QuantizedAdamW : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::use_simd_target(GetParam()); }
  void TearDown() override { detail::use_simd_target(""); }
};
INSTANTIATE_TEST_SUITE_P(, QuantizedAdamW, ::testing::ValuesIn(detail::simd_targets()),
                         [](const auto& target) { return target.param; });

/// The definition: for each decade the means of neighbouring boundaries, evenly spaced from a tenth of its end to its
/// end.
std::vector<double> map_by_definition(DynamicCode code) {
  std::vector<double> map{0, 1};
  for (int decade = 0; decade < 7; ++decade) {
    const int cells = 1 << (code == DynamicCode::kSigned ? decade : decade + 1);
    const double end = std::pow(10.0, decade - 6);
    for (int i = 0; i < cells; ++i) {
      const double low = 0.1 + 0.9 * i / cells;
      const double high = 0.1 + 0.9 * (i + 1) / cells;
      map.push_back(end * (low + high) / 2);
      if (code == DynamicCode::kSigned) {
        map.push_back(-map.back());
      }
    }
  }
  std::sort(map.begin(), map.end());
  return map;
}

std::vector<float> all_values(DynamicCode code) {
  std::vector<uint8_t> codes(256);
  for (size_t i = 0; i < 256; ++i) {
    codes[i] = static_cast<uint8_t>(i);
  }
  const float one = 1;
  std::vector<float> values(256);
  dequantize(code, codes.data(), &one, values.data(), 256);
  return values;
}

/// The codes of numbers from -1 to 1, each in a block whose largest magnitude is 1.
std::vector<uint8_t> codes_of(DynamicCode code, const std::vector<float>& values) {
  std::vector<uint8_t> result;
  for (size_t begin = 0; begin < values.size(); begin += 255) {
    const size_t end = std::min(begin + 255, values.size());
    std::vector<float> block(values.begin() + static_cast<int64_t>(begin), values.begin() + static_cast<int64_t>(end));
    block.push_back(1);
    std::vector<uint8_t> codes(block.size());
    float largest = 0;
    quantize(code, block.data(), codes.data(), &largest, static_cast<int64_t>(block.size()));
    EXPECT_EQ(largest, 1);
    result.insert(result.end(), codes.begin(), codes.end() - 1);
  }
  return result;
}

TEST_P(QuantizedAdamW, ItsMapsAreTheDynamicMapsOfThePaper) {
  for (const DynamicCode code : {DynamicCode::kSigned, DynamicCode::kUnsigned}) {
    const std::vector<double> expected = map_by_definition(code);
    const std::vector<float> values = all_values(code);
    ASSERT_EQ(expected.size(), 256u);
    for (size_t i = 0; i < 256; ++i) {
      EXPECT_NEAR(values[i], expected[i], 1e-6 * std::abs(expected[i])) << i;
    }
    EXPECT_EQ(values[255], 1);
    EXPECT_EQ(values[code == DynamicCode::kSigned ? 127 : 0], 0);
  }
}

TEST_P(QuantizedAdamW, AValueOfTheMapKeepsItsCode) {
  for (const DynamicCode code : {DynamicCode::kSigned, DynamicCode::kUnsigned}) {
    const std::vector<uint8_t> codes = codes_of(code, all_values(code));
    for (size_t i = 0; i < 256; ++i) {
      EXPECT_EQ(codes[i], i);
    }
  }
}

TEST_P(QuantizedAdamW, TheCodeChangesHalfwayBetweenNeighbours) {
  for (const DynamicCode code : {DynamicCode::kSigned, DynamicCode::kUnsigned}) {
    const std::vector<double> map = map_by_definition(code);
    // Without a sign, all above zero is at least the first value.
    for (size_t i = code == DynamicCode::kSigned ? 0 : 1; i + 1 < 256; ++i) {
      const double middle = (map[i] + map[i + 1]) / 2;
      const double off = 2e-6 * std::abs(middle);
      EXPECT_THAT(codes_of(code, {static_cast<float>(middle - off), static_cast<float>(middle + off)}),
                  testing::ElementsAre(i, i + 1));
    }
  }
}

TEST_P(QuantizedAdamW, AnyNumberGetsTheNearestValue) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> exponent(-9, 0);
  for (const DynamicCode code : {DynamicCode::kSigned, DynamicCode::kUnsigned}) {
    std::vector<float> numbers{-1, -0.9999f, -1e-12f};
    for (int i = 0; i < 20000; ++i) {
      numbers.push_back((i % 2 == 0 ? 1.0f : -1.0f) * std::pow(10.0f, exponent(random)));
    }
    if (code == DynamicCode::kUnsigned) {
      for (float& number : numbers) {
        number = std::max(std::abs(number), 1.7e-7f);
      }
    }
    const std::vector<float> values = all_values(code);
    const std::vector<uint8_t> codes = codes_of(code, numbers);
    for (size_t i = 0; i < numbers.size(); ++i) {
      double best = 2;
      for (const float value : values) {
        best = std::min(best, std::abs(double{value} - double{numbers[i]}));
      }
      EXPECT_LE(std::abs(double{values[codes[i]]} - double{numbers[i]}), best + 4e-7 * std::abs(numbers[i]))
          << numbers[i];
    }
  }
}

TEST_P(QuantizedAdamW, OnlyAZeroSecondMomentBecomesZero) {
  EXPECT_THAT(codes_of(DynamicCode::kUnsigned, {0.0f, 1e-30f, 1e-12f, 1e-7f, 3e-7f}),
              testing::ElementsAre(0, 1, 1, 1, 1));
  EXPECT_THAT(codes_of(DynamicCode::kSigned, {0.0f, 1e-30f, 2.7e-7f, 2.8e-7f, -2.7e-7f, -2.8e-7f}),
              testing::ElementsAre(127, 127, 127, 128, 127, 126));
}

TEST_P(QuantizedAdamW, BlocksOfZerosAndOfExtremesStayFinite) {
  for (const float largest : {0.0f, 1e-45f, 1e-38f, 1e-36f, 1.0f, 3.4e38f}) {
    for (const DynamicCode code : {DynamicCode::kSigned, DynamicCode::kUnsigned}) {
      const std::vector<float> values(300, largest);
      std::vector<uint8_t> codes(300);
      std::vector<float> maxima(2);
      std::vector<float> back(300);
      quantize(code, values.data(), codes.data(), maxima.data(), 300);
      dequantize(code, codes.data(), maxima.data(), back.data(), 300);
      EXPECT_THAT(maxima, testing::Each(largest));
      const float tolerance = largest > 1e-37f ? 0 : largest;
      EXPECT_THAT(back, testing::Each(testing::FloatNear(largest, tolerance)));
    }
  }
}

/// A tensor and its optimizer state, with some more elements behind that must not change.
struct State {
  explicit State(int64_t count)
      : n(static_cast<size_t>(count)),
        blocks(static_cast<size_t>(quantization_blocks(count))),
        p(n + 8, 7),
        g(n + 8, 7),
        m(n + 8, 7),
        v(n + 8, 7),
        m_max(blocks + 1, 7),
        v_max(blocks + 1, 7) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> moment(n);
    std::generate_n(p.begin(), n, [&] { return normal(random); });
    std::generate_n(g.begin(), n, [&] { return normal(random) * std::pow(10.0f, normal(random) - 3); });
    std::generate(moment.begin(), moment.end(), [&] { return normal(random) * 1e-3f; });
    quantize(DynamicCode::kSigned, moment.data(), m.data(), m_max.data(), count);
    std::generate(moment.begin(), moment.end(), [&] { return std::pow(normal(random) * 1e-3f, 2.0f); });
    quantize(DynamicCode::kUnsigned, moment.data(), v.data(), v_max.data(), count);
  }
  void update(const AdamWStep& step, int64_t begin, int64_t end) {
    const EightBitMoments state{m.data(), v.data(), m_max.data(), v_max.data()};
    adamw8bit_update(step, p.data() + begin, g.data() + begin, state.from(begin), end - begin);
  }
  std::vector<float> decoded(DynamicCode code) const {
    std::vector<float> values(n);
    const bool is_signed = code == DynamicCode::kSigned;
    dequantize(code, (is_signed ? m : v).data(), (is_signed ? m_max : v_max).data(), values.data(),
               static_cast<int64_t>(n));
    return values;
  }

  size_t n;
  size_t blocks;
  std::vector<float> p;
  std::vector<float> g;
  std::vector<uint8_t> m;
  std::vector<uint8_t> v;
  std::vector<float> m_max;
  std::vector<float> v_max;
};

constexpr AdamWStep kStep{.lr = 0.01,
                          .beta1 = 0.8,
                          .beta2 = 0.99,
                          .eps = 1e-8,
                          .weight_decay = 0.1,
                          .bias_correction1 = 0.6,
                          .bias_correction2 = 0.3,
                          .inverse_scale = 0.125f};

/// What becomes of an exact moment when it is rounded.
void expect_rounded(DynamicCode code, const std::vector<double>& exact, const std::vector<float>& actual) {
  const auto count = static_cast<int64_t>(exact.size());
  const std::vector<float> values(exact.begin(), exact.end());
  std::vector<uint8_t> codes(exact.size());
  std::vector<float> maxima(static_cast<size_t>(quantization_blocks(count)));
  std::vector<float> rounded(exact.size());
  quantize(code, values.data(), codes.data(), maxima.data(), count);
  dequantize(code, codes.data(), maxima.data(), rounded.data(), count);
  for (size_t i = 0; i < exact.size(); ++i) {
    // What is rounded up to the least value is far below it.
    const double largest = std::max(std::abs(exact[i]), std::abs(double{actual[i]}));
    EXPECT_LE(std::abs(actual[i] - exact[i]), std::abs(rounded[i] - exact[i]) + 2e-6 * largest) << i;
  }
}

TEST_P(QuantizedAdamW, AStepIsThatOfAdamWOnTheDecodedMoments) {
  for (const int64_t count : {1, 255, 256, 257, 512, 1000, 5000}) {
    State state(count);
    const State before = state;
    const std::vector<float> m_before = state.decoded(DynamicCode::kSigned);
    const std::vector<float> v_before = state.decoded(DynamicCode::kUnsigned);
    state.update(kStep, 0, count);
    std::vector<double> m(before.n);
    std::vector<double> v(before.n);
    for (size_t i = 0; i < before.n; ++i) {
      const double g = double{before.g[i]} * 0.125;
      m[i] = 0.8 * m_before[i] + 0.2 * g;
      v[i] = 0.99 * v_before[i] + 0.01 * g * g;
      const double p = before.p[i] * (1 - 0.01 * 0.1) - 0.01 / 0.6 * m[i] / (std::sqrt(v[i] / 0.3) + 1e-8);
      EXPECT_NEAR(state.p[i], p, 1e-6 * std::max(1.0, std::abs(p))) << i << " of " << count;
    }
    expect_rounded(DynamicCode::kSigned, m, state.decoded(DynamicCode::kSigned));
    expect_rounded(DynamicCode::kUnsigned, v, state.decoded(DynamicCode::kUnsigned));
    for (size_t i = before.n; i < before.n + 8; ++i) {
      EXPECT_EQ(state.p[i] + static_cast<float>(state.m[i] + state.v[i]), 21) << "written behind the end";
    }
    EXPECT_EQ(state.m_max.back() + state.v_max.back(), 14) << "written behind the end";
    EXPECT_EQ(state.g, before.g);
  }
}

TEST_P(QuantizedAdamW, SplitWeightsTakeTheSameStepRoundedTo24Bits) {
  for (const int64_t count : {1, 255, 256, 257, 1000}) {
    State full(count);
    State split(count);
    std::vector<BFloat16> p(full.n + 8, BFloat16{7});
    std::vector<BFloat16> g(full.n);
    std::vector<int8_t> correction(full.n + 8, 7);
    std::vector<int8_t> unused(full.n);
    split_weights(full.p.data(), p.data(), correction.data(), count);
    split_weights(full.g.data(), g.data(), unused.data(), count);
    join_weights(p.data(), correction.data(), full.p.data(), count);  // the same weights and gradients in FP32
    std::fill(unused.begin(), unused.end(), int8_t{0});
    join_weights(g.data(), unused.data(), full.g.data(), count);
    full.update(kStep, 0, count);
    adamw8bit_update(kStep, p.data(), correction.data(), g.data(),
                     {split.m.data(), split.v.data(), split.m_max.data(), split.v_max.data()}, count);
    std::vector<BFloat16> expected_p(full.n);
    std::vector<int8_t> expected_correction(full.n);
    split_weights(full.p.data(), expected_p.data(), expected_correction.data(), count);
    for (size_t i = 0; i < full.n; ++i) {
      EXPECT_EQ(p[i].bits, expected_p[i].bits) << i;
      EXPECT_EQ(correction[i], expected_correction[i]) << i;
    }
    EXPECT_EQ(split.m, full.m);
    EXPECT_EQ(split.v, full.v);
    EXPECT_EQ(split.m_max, full.m_max);
    EXPECT_EQ(split.v_max, full.v_max);
    for (size_t i = full.n; i < full.n + 8; ++i) {
      EXPECT_EQ(p[i].bits + correction[i], 14) << "written behind the end";
    }
  }
}

TEST_P(QuantizedAdamW, PartsThatBeginAtABlockGiveTheSameBitsAsTheWhole) {
  State whole(3000);
  State parts(3000);
  whole.update(kStep, 0, 3000);
  parts.update(kStep, 2560, 3000);
  parts.update(kStep, 256, 2560);
  parts.update(kStep, 0, 256);
  EXPECT_EQ(whole.p, parts.p);
  EXPECT_EQ(whole.m, parts.m);
  EXPECT_EQ(whole.v, parts.v);
  EXPECT_EQ(whole.m_max, parts.m_max);
  EXPECT_EQ(whole.v_max, parts.v_max);
}

TEST_P(QuantizedAdamW, StateOfZeroBytesIsAZeroMoment) {
  State state(300);
  std::fill(state.m.begin(), state.m.end(), uint8_t{0});
  std::fill(state.v.begin(), state.v.end(), uint8_t{0});
  std::fill(state.m_max.begin(), state.m_max.end(), 0.0f);
  std::fill(state.v_max.begin(), state.v_max.end(), 0.0f);
  const State before = state;
  const AdamWStep first{.lr = 0.01, .weight_decay = 0, .bias_correction1 = 0.1, .bias_correction2 = 0.001};
  state.update(first, 0, 300);
  for (size_t i = 0; i < 300; ++i) {
    EXPECT_NEAR(before.p[i] - state.p[i],
                std::copysign(0.01f, before.g[i]) * std::abs(before.g[i]) / (std::abs(before.g[i]) + 1e-8f), 1e-6);
  }
}

TEST_P(QuantizedAdamW, WhatNeverHadAGradientOnlyDecays) {
  State state(512);
  std::fill(state.m.begin(), state.m.end(), uint8_t{127});
  std::fill(state.v.begin(), state.v.end(), uint8_t{0});
  std::fill(state.g.begin(), state.g.begin() + 400, 0.0f);  // a whole block, and one in part
  const std::vector<float> before = state.p;
  state.update(kStep, 0, 512);
  for (size_t i = 0; i < 400; ++i) {
    EXPECT_FLOAT_EQ(state.p[i], before[i] * static_cast<float>(1 - 0.01 * 0.1)) << i;
    EXPECT_EQ(state.m[i], 127) << i;
    EXPECT_EQ(state.v[i], 0) << i;
  }
  EXPECT_EQ(state.v_max[0], 0);
  EXPECT_GT(state.v_max[1], 0);
}

TEST_P(QuantizedAdamW, ALearningRateOfZeroOrNextToItMovesTheMomentsAlone) {
  for (const double lr : {0.0, 1e-35}) {
    State state(700);
    std::fill(state.p.begin(), state.p.begin() + 300, 0.0f);
    std::fill(state.v.begin(), state.v.begin() + 256, uint8_t{0});
    std::fill(state.g.begin(), state.g.begin() + 100, 0.0f);
    const State before = state;
    AdamWStep step = kStep;
    step.lr = lr;
    state.update(step, 0, 700);
    EXPECT_EQ(state.p, before.p);
    EXPECT_NE(state.m, before.m);
    EXPECT_NE(state.v, before.v);
  }
}

TEST_P(QuantizedAdamW, TheLossScaleMayBeLargeOrSmall) {
  for (const float scale : {0x1p-60f, 0x1p60f}) {
    State scaled(512);
    std::transform(scaled.g.begin(), scaled.g.end(), scaled.g.begin(), [&](float g) { return g * scale; });
    AdamWStep step = kStep;
    step.inverse_scale = 1 / scale;
    State same(512);
    AdamWStep unscaled = kStep;
    unscaled.inverse_scale = 1;
    same.update(unscaled, 0, 512);
    scaled.update(step, 0, 512);
    EXPECT_EQ(scaled.p, same.p) << scale;
    EXPECT_EQ(scaled.m, same.m) << scale;
    EXPECT_EQ(scaled.v, same.v) << scale;
  }
}

/// An element whose gradient is 4,000 times smaller than another's in its block, and then ends: how far it goes in
/// steps of lr.
double way_of_a_small_gradient() {
  std::vector<float> p(256, 0);
  std::vector<float> g(256, 1);
  std::vector<uint8_t> m(256, 127);
  std::vector<uint8_t> v(256, 0);
  float m_max = 0;
  float v_max = 0;
  for (int i = 1; i <= 50; ++i) {
    g[5] = i <= 30 ? 2.5e-4f : 0;
    const AdamWStep step{.lr = 1e-3,
                         .weight_decay = 0,
                         .bias_correction1 = 1 - std::pow(0.9, i),
                         .bias_correction2 = 1 - std::pow(0.999, i)};
    adamw8bit_update(step, p.data(), g.data(), {m.data(), v.data(), &m_max, &v_max}, 256);
  }
  return std::abs(p[5]) / 1e-3;
}

TEST_P(QuantizedAdamW, AGradientThatIsSmallInItsBlockDoesNotLeapWhenItEnds) {
  // In FP32 it goes 39 steps of lr. With second moments rounded to zero, 480,000.
  EXPECT_LT(way_of_a_small_gradient(), 39);
  EXPECT_GT(way_of_a_small_gradient(), 5);
}

}  // namespace
}  // namespace snug::kernels::quantized_adamw_test
