#include "tests/kernels/split_weights.h"

#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tests/support/simd_targets.h"

namespace snug::kernels::split_weights_test {
namespace {

/// Each test runs with every instruction set that this processor has.
class SplitWeights : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::use_simd_target(GetParam()); }
  void TearDown() override { detail::use_simd_target(""); }
};
const auto name_of = [](const auto& target) { return target.param; };
INSTANTIATE_TEST_SUITE_P(, SplitWeights, ::testing::ValuesIn(detail::simd_targets()), name_of);

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

}  // namespace
}  // namespace snug::kernels::split_weights_test
