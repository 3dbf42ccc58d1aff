#include <algorithm>
#include <bit>
#include <bitset>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "src/kernels/master_adamw.h"
#include "tests/kernels/conversions.h"
#include "tests/support/simd_targets.h"

namespace snug::kernels::stochastic_adamw_test {
namespace {

/// Each test runs with every instruction set that this processor has.
class StochasticAdamW : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::use_simd_target(GetParam()); }
  void TearDown() override { detail::use_simd_target(""); }
};
INSTANTIATE_TEST_SUITE_P(, StochasticAdamW, ::testing::ValuesIn(detail::simd_targets()),
                         [](const auto& target) { return target.param; });

/// One random number for each of the 65536 upper halves.
std::vector<uint32_t> each_upper_half() {
  std::vector<uint32_t> bits(65536);
  for (uint32_t i = 0; i < 65536; ++i) {
    bits[i] = i << 16;
  }
  return bits;
}

/// Of 65536 roundings of one value, with each random number once: how many go to `bits`.
int64_t count_of(uint16_t bits, const std::vector<BFloat16>& rounded) {
  return std::count_if(rounded.begin(), rounded.end(), [bits](BFloat16 value) { return value.bits == bits; });
}

TEST_P(StochasticAdamW, RoundsAwayFromZeroWithExactlyTheProbabilityOfTheDroppedFraction) {
  const std::vector<uint32_t> random = each_upper_half();
  std::vector<BFloat16> rounded(65536);
  for (const uint32_t high : {0x3F80u, 0xBFFFu, 0x0000u, 0x7F00u}) {
    for (uint32_t low = 0; low < 65536; low += high == 0x3F80 ? 17 : 1021) {
      const std::vector<float> values(65536, std::bit_cast<float>(high << 16 | low));
      round_stochastically(values.data(), random.data(), rounded.data(), 65536);
      ASSERT_EQ(count_of(static_cast<uint16_t>(high + 1), rounded), low);
      ASSERT_EQ(count_of(static_cast<uint16_t>(high), rounded), 65536 - low);
    }
  }
}

TEST_P(StochasticAdamW, LeavesInfinityAndNaNWhatTheyAre) {
  const std::vector<uint32_t> random = each_upper_half();
  std::vector<BFloat16> rounded(65536);
  std::vector<float> values(65536, -std::numeric_limits<float>::infinity());
  round_stochastically(values.data(), random.data(), rounded.data(), 65536);
  EXPECT_EQ(count_of(0xFF80, rounded), 65536);
  std::fill(values.begin(), values.end(), std::bit_cast<float>(0x7FFFFFFFu));
  round_stochastically(values.data(), random.data(), rounded.data(), 65536);
  EXPECT_EQ(count_of(0x7FFF, rounded), 65536);
}

TEST(RandomBits, AreEvenlySpread) {
  constexpr uint64_t kCount = 1 << 18;
  for (const RandomKey& key :
       {RandomKey{0, 0}, RandomKey{0, 1}, RandomKey{1, 0}, RandomKey{42, 1000}, RandomKey{1ull << 63, 7}}) {
    std::vector<double> buckets(256);
    std::vector<double> steps(256);  // from one element to the next
    std::vector<double> ones(32);
    for (uint64_t i = 0; i < kCount; ++i) {
      const uint32_t bits = random_bits(key, i);
      ++buckets[bits >> 24];
      ++steps[(random_bits(key, i + 1) - bits) >> 24];
      for (size_t bit = 0; bit < 32; ++bit) {
        ones[bit] += bits >> bit & 1;
      }
    }
    const auto chi_square = [](const std::vector<double>& counts) {
      constexpr double kExpected = kCount / 256.0;
      return std::accumulate(counts.begin(), counts.end(), 0.0, [](double sum, double count) {
        return sum + (count - kExpected) * (count - kExpected) / kExpected;
      });
    };
    // 255 degrees of freedom: mean 255, standard deviation 22.6.
    EXPECT_THAT(chi_square(buckets), testing::AllOf(testing::Gt(255 - 5 * 22.6), testing::Lt(255 + 5 * 22.6)));
    EXPECT_THAT(chi_square(steps), testing::AllOf(testing::Gt(255 - 5 * 22.6), testing::Lt(255 + 5 * 22.6)));
    // Standard deviation 256.
    EXPECT_THAT(ones, testing::Each(testing::DoubleNear(kCount / 2, 5 * 256)));
  }
}

TEST(RandomBits, DifferByHalfTheirBitsWhereSeedStepOrIndexDiffers) {
  double differences[3] = {};
  for (uint64_t i = 0; i < 10000; ++i) {
    const uint32_t bits = random_bits({.seed = 5, .step = 9}, i);
    differences[0] += std::popcount(bits ^ random_bits({.seed = 6, .step = 9}, i));
    differences[1] += std::popcount(bits ^ random_bits({.seed = 5, .step = 10}, i));
    differences[2] += std::popcount(bits ^ random_bits({.seed = 5, .step = 9}, i + (1ull << 32)));
  }
  // Standard deviation of a sum of 320,000 fair bits: 283.
  EXPECT_THAT(differences, testing::Each(testing::DoubleNear(160000, 5 * 283)));
}

constexpr AdamWStep kStep{.lr = 1e-3,
                          .beta1 = 0.9,
                          .beta2 = 0.999,
                          .eps = 1e-8,
                          .weight_decay = 0.01,
                          .bias_correction1 = 0.1,
                          .bias_correction2 = 0.001};

struct State {
  explicit State(size_t count) : p(count), g(count), m(count, 0.001f), v(count, 1e-6f) {
    for (size_t i = 0; i < count; ++i) {
      p[i].bits = static_cast<uint16_t>(0x3F00 + i % 256);
      g[i].bits = static_cast<uint16_t>(0xBC00 + i % 97);
    }
  }
  void update(RandomKey key, size_t begin, size_t end) {
    key.offset += begin;
    stochastic_adamw_update(kStep, key, p.data() + begin, g.data() + begin, m.data() + begin, v.data() + begin,
                            static_cast<int64_t>(end - begin));
  }
  std::vector<uint16_t> bits() const {
    std::vector<uint16_t> result;
    std::transform(p.begin(), p.end(), std::back_inserter(result), [](BFloat16 value) { return value.bits; });
    return result;
  }
  std::vector<BFloat16> p;
  std::vector<BFloat16> g;
  std::vector<float> m;
  std::vector<float> v;
};

TEST_P(StochasticAdamW, AStepIsThatOfAMasterRoundedWithTheElementsRandomNumber) {
  // Around 2^32 the shared half of the index changes.
  for (const uint64_t offset : {uint64_t{0}, (uint64_t{1} << 32) - 500}) {
    const RandomKey key{.seed = 11, .step = 3, .offset = offset};
    State state(1003);
    State with_masters = state;
    std::vector<float> master(1003);
    widen(state.p.data(), master.data(), 1003);
    master_adamw_update(kStep, master.data(), with_masters.p.data(), with_masters.g.data(), with_masters.m.data(),
                        with_masters.v.data(), 1003);
    std::vector<uint32_t> random(1003);
    for (size_t i = 0; i < 1003; ++i) {
      random[i] = random_bits(key, i);
    }
    round_stochastically(master.data(), random.data(), with_masters.p.data(), 1003);
    state.update(key, 0, 1003);
    EXPECT_EQ(state.bits(), with_masters.bits());
    EXPECT_EQ(state.m, with_masters.m);
    EXPECT_EQ(state.v, with_masters.v);
  }
}

TEST_P(StochasticAdamW, TheResultDoesNotDependOnHowElementsAreDividedAmongThreads) {
  const RandomKey key{.seed = 11, .step = 3};
  State whole(1003);
  State parts(1003);
  State other_step(1003);
  whole.update(key, 0, 1003);
  parts.update(key, 700, 1003);
  parts.update(key, 5, 700);
  parts.update(key, 0, 5);
  other_step.update({.seed = 11, .step = 4}, 0, 1003);
  EXPECT_EQ(whole.bits(), parts.bits());
  EXPECT_NE(whole.bits(), other_step.bits());
}

/// Where 1 is after 100 steps of 0.001 down, each less than half the distance to the next BF16 number.
double after_small_steps(bool stochastic) {
  constexpr int64_t kCount = 4096;
  std::vector<BFloat16> p(kCount, BFloat16{0x3F80});
  const std::vector<BFloat16> g(kCount, BFloat16{0x3F80});
  std::vector<float> m(kCount);
  std::vector<float> v(kCount);
  std::vector<float> values(kCount);
  for (int i = 1; i <= 100; ++i) {
    const AdamWStep step{.lr = 1e-3,
                         .weight_decay = 0,
                         .bias_correction1 = 1 - std::pow(0.9, i),
                         .bias_correction2 = 1 - std::pow(0.999, i)};
    if (stochastic) {
      stochastic_adamw_update(step, {.seed = 1, .step = static_cast<uint64_t>(i)}, p.data(), g.data(), m.data(),
                              v.data(), kCount);
    } else {
      widen(p.data(), values.data(), kCount);
      master_adamw_update(step, values.data(), p.data(), g.data(), m.data(), v.data(), kCount);
    }
  }
  widen(p.data(), values.data(), kCount);
  return std::accumulate(values.begin(), values.end(), 0.0) / kCount;
}

TEST_P(StochasticAdamW, StepsTooSmallForBFloat16CountOnAverage) {
  // A way has a standard deviation of 0.017, the mean of 4096 of them 0.0003.
  EXPECT_NEAR(after_small_steps(true), 0.9, 0.0015);
  EXPECT_EQ(after_small_steps(false), 1);
}

}  // namespace
}  // namespace snug::kernels::stochastic_adamw_test
