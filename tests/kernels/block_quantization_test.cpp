#include "snug/kernels/detail/block_quantization.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "snug/kernels/detail/simd_targets.h"

namespace snug::kernels::block_quantization_test {
namespace {

struct Quantized {
  std::vector<uint8_t> codes;
  std::vector<float> ranges;
  bool ok;
};

Quantized quantized(int bits, const std::vector<float>& values, uint64_t seed = 0, int64_t first_block = 0) {
  const auto count = static_cast<int64_t>(values.size());
  Quantized result{std::vector<uint8_t>(static_cast<size_t>(range_code_bytes(count, bits))),
                   std::vector<float>(static_cast<size_t>(2 * range_blocks(count))), false};
  result.ok = quantize_blocks(bits, seed, first_block, values.data(), count, result.codes.data(), result.ranges.data());
  return result;
}

std::vector<float> round_trip(int bits, const std::vector<float>& values, uint64_t seed = 0) {
  const Quantized q = quantized(bits, values, seed);
  EXPECT_TRUE(q.ok);
  std::vector<float> result(values.size());
  dequantize_blocks(bits, q.codes.data(), q.ranges.data(), static_cast<int64_t>(values.size()), result.data());
  return result;
}

std::vector<float> normal_values(size_t count) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return values;
}

/// (greatest - least) / levels of the block that holds element i.
float step_of(int bits, const std::vector<float>& values, size_t i) {
  const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i / 256 * 256);
  const auto end = values.end() - begin > 256 ? begin + 256 : values.end();
  const auto [least, greatest] = std::minmax_element(begin, end);
  return (*greatest - *least) / static_cast<float>((1 << bits) - 1);
}

/// Each test runs with every instruction set that this processor has, in 8 and in 4 bits.
class BlockQuantization : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  void SetUp() override { detail::use_simd_target(std::get<0>(GetParam())); }
  void TearDown() override { detail::use_simd_target(""); }
  const int bits = std::get<1>(GetParam());
};
INSTANTIATE_TEST_SUITE_P(, BlockQuantization,
                         ::testing::Combine(::testing::ValuesIn(detail::simd_targets()), ::testing::Values(8, 4)),
                         [](const auto& at) {
                           return std::get<0>(at.param) + "_" + std::to_string(std::get<1>(at.param));
                         });

TEST_P(BlockQuantization, MovesAValueByLessThanAStepOfItsBlock) {
  for (const size_t count : {1, 3, 255, 256, 257, 1000}) {
    auto values = normal_values(count);
    std::transform(values.begin(), values.end(), values.begin(), [](float x) { return 40 * x + 7; });
    const auto rounded = round_trip(bits, values);
    for (size_t i = 0; i < count; ++i) {
      // and three roundings of numbers below 256 in FP32
      EXPECT_LE(std::abs(rounded[i] - values[i]), step_of(bits, values, i) + 3 * 256 * 0x1p-24f) << i;
    }
  }
}

TEST_P(BlockQuantization, KeepsLeastAndGreatestAndWhatLiesOnTheGrid) {
  const int levels = (1 << bits) - 1;
  std::vector<float> values(256);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<int>(i) % (levels + 1)) - 5;  // steps of one: exact in FP32
  }
  for (const uint64_t seed : {0, 1, 2, 3}) {
    EXPECT_EQ(round_trip(bits, values, seed), values);
  }
  EXPECT_EQ(round_trip(bits, std::vector<float>(300, 1.5f)), std::vector<float>(300, 1.5f));
  EXPECT_EQ(round_trip(bits, std::vector<float>(300, 0.0f)), std::vector<float>(300, 0.0f));
}

// The greatest value's place on the grid may come out a little above the last level, and must not be rounded up from
// there: once in a million elements.
TEST_P(BlockQuantization, NeverGoesBeyondTheGreatestValue) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  float width = 1;
  while (width * (levels / width) <= levels) {
    width = std::nextafter(width, 2.0f);
  }
  std::vector<float> values(256, width);
  values[0] = 0;
  const auto expected = quantized(bits, values).codes;
  int others = 0;
  for (uint64_t seed = 0; seed < (1 << 16); ++seed) {
    others += quantized(bits, values, seed).codes != expected ? 1 : 0;
  }
  EXPECT_EQ(others, 0);
}

// The rounding of x has variance f (1 - f) step^2 <= step^2 / 4, so the mean of n has a deviation of at most step / (2
// sqrt n). Over 256 elements five deviations are passed by chance once in ten thousand runs; the seeds are fixed.
TEST_P(BlockQuantization, HasTheValueAsItsMeanOverSeeds) {
  constexpr int kSeeds = 4096;
  const auto values = normal_values(256);
  std::vector<double> sum(values.size());
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto rounded = round_trip(bits, values, seed);
    std::transform(sum.begin(), sum.end(), rounded.begin(), sum.begin(), [](double s, float x) { return s + x; });
  }
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_LE(std::abs(sum[i] / kSeeds - values[i]), 5 * step_of(bits, values, i) / (2 * std::sqrt(kSeeds))) << i;
  }
}

// The errors of neighbours, blocks and other data must not go together, or a sum over many would not average them out.
TEST_P(BlockQuantization, RoundsElementsIndependently) {
  constexpr size_t kCount = 1 << 16;
  const auto values = normal_values(kCount);
  auto shifted = values;
  std::rotate(shifted.begin(), shifted.begin() + 1, shifted.end());
  const auto errors_of = [this](const std::vector<float>& x) {
    const auto rounded = round_trip(bits, x);
    std::vector<double> errors(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      errors[i] =
          (static_cast<double>(rounded[i]) - static_cast<double>(x[i])) / static_cast<double>(step_of(bits, x, i));
    }
    return errors;
  };
  const auto errors = errors_of(values);
  const auto others = errors_of(shifted);
  // A product of two independent errors has a deviation of at most 1 / 4 (of steps squared).
  const double five_deviations = 5 * 0.25 / std::sqrt(kCount);
  for (const size_t distance : {1, 2, 16, 128, 256}) {
    double sum = 0;
    for (size_t i = distance; i < kCount; ++i) {
      sum += errors[i] * errors[i - distance];
    }
    EXPECT_LE(std::abs(sum / kCount), five_deviations) << distance;
  }
  double same_place = 0;
  for (size_t i = 0; i < kCount; ++i) {
    same_place += errors[i] * others[i];
  }
  EXPECT_LE(std::abs(same_place / kCount), five_deviations);
}

TEST_P(BlockQuantization, GivesTheSameCodesForTheSameSeedAndOthersForAnother) {
  const auto values = normal_values(1000);
  EXPECT_EQ(quantized(bits, values, 7).codes, quantized(bits, values, 7).codes);
  EXPECT_NE(quantized(bits, values, 7).codes, quantized(bits, values, 8).codes);
  EXPECT_NE(quantized(bits, values, 7, 1).codes, quantized(bits, values, 7, 0).codes);
}

TEST_P(BlockQuantization, MayBeSplitAtBlocks) {
  const auto values = normal_values(1000);
  const auto whole = quantized(bits, values);
  const auto first = quantized(bits, {values.begin(), values.begin() + 512});
  const auto second = quantized(bits, {values.begin() + 512, values.end()}, 0, 2);
  auto joined = first.codes;
  joined.insert(joined.end(), second.codes.begin(), second.codes.end());
  EXPECT_EQ(joined, whole.codes);
}

TEST_P(BlockQuantization, SaysWhereItCannot) {
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    for (const size_t place : {0, 255, 256, 299}) {
      std::vector<float> values(300, 1.0f);
      values[place] = bad;
      EXPECT_FALSE(quantized(bits, values).ok) << bad << " at " << place;
    }
  }
  std::vector<float> values(300, 3e38f);
  values[1] = -3e38f;
  EXPECT_FALSE(quantized(bits, values).ok) << "the range overflows";
  values[1] = -0.1e38f;
  EXPECT_TRUE(quantized(bits, values).ok);
}

TEST(BlockQuantizationTargets, GiveTheSameCodes) {
  const auto values = normal_values(1000);
  for (const int bits : {8, 4}) {
    const auto best = quantized(bits, values);
    for (const std::string& target : detail::simd_targets()) {
      detail::use_simd_target(target);
      EXPECT_EQ(quantized(bits, values).codes, best.codes) << target;
    }
    detail::use_simd_target("");
  }
}

}  // namespace
}  // namespace snug::kernels::block_quantization_test
