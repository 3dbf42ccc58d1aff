// The inner loop of the table of segments, with each instruction set.

#include "src/planner/faster_choices.h"

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/simd_targets.h"

namespace snug::plan::faster_choices_test {
namespace {

/// Each test runs with every instruction set that this processor has.
class FasterChoices : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { kernels::detail::use_simd_target(GetParam()); }
  void TearDown() override { kernels::detail::use_simd_target(""); }
};
INSTANTIATE_TEST_SUITE_P(, FasterChoices, ::testing::ValuesIn(kernels::detail::simd_targets()),
                         [](const auto& target) { return target.param; });

constexpr float kNoLeast = -std::numeric_limits<float>::infinity();

// Seconds that are often equal, with some that are impossible.
std::vector<float> seconds(int count, std::mt19937& random) {
  std::vector<float> values;
  for (int i = 0; i < count; ++i) {
    const unsigned number = random() % 8;
    values.push_back(number == 7 ? std::numeric_limits<float>::infinity() : 0.1f * static_cast<float>(number));
  }
  return values;
}

TEST_P(FasterChoices, AreTakenWhereTheSumIsLessAndNowhereElse) {
  constexpr float kOwn = 0.3f;
  constexpr uint32_t kChoice = 77;
  std::mt19937 random(1);
  int taken = 0, left = 0;
  for (int slots = 0; slots <= 70; ++slots) {
    SCOPED_TRACE(slots);
    const int count = slots + 20;  // the last slots are another's
    const std::vector<float> rest = seconds(count, random), again = seconds(count, random);
    std::vector<float> best = seconds(count, random), expected_best = best;
    std::vector<uint32_t> choices, expected_choices;
    for (int i = 0; i < count; ++i) {
      choices.push_back(static_cast<uint32_t>(i));
    }
    expected_choices = choices;
    for (size_t i = 0; i < static_cast<size_t>(slots); ++i) {
      const float sum = kOwn + rest[i] + again[i];
      if (sum < best[i]) {
        expected_best[i] = sum;
        expected_choices[i] = kChoice;
        ++taken;
      } else {
        ++left;
      }
    }
    take_faster(best.data(), choices.data(), rest.data(), again.data(), kOwn, kChoice, kNoLeast, slots);
    ASSERT_EQ(best, expected_best);
    ASSERT_EQ(choices, expected_choices);
  }
  EXPECT_GT(taken, 0);
  EXPECT_GT(left, 0);
}

TEST_P(FasterChoices, LeaveTheEarlierOfTwoChoicesThatAreAsFast) {
  const std::vector<float> rest(9, 1.0f), again(9, 0.25f);
  std::vector<float> best(9, 1.75f);
  std::vector<uint32_t> choices(9, 1);
  take_faster(best.data(), choices.data(), rest.data(), again.data(), 0.5f, 2, kNoLeast, 9);
  EXPECT_EQ(choices, std::vector<uint32_t>(9, 1));
  take_faster(best.data(), choices.data(), rest.data(), again.data(), 0.25f, 2, kNoLeast, 9);
  EXPECT_EQ(choices, std::vector<uint32_t>(9, 2));
  EXPECT_EQ(best, std::vector<float>(9, 1.5f));
}

TEST_P(FasterChoices, AreNotLookedForWhereTheLeastSumIsNoLess) {
  constexpr int kMostLanes = 16;
  const std::vector<float> rest(2 * kMostLanes, 0.25f), again(2 * kMostLanes, 0.0f);
  std::vector<float> best(kMostLanes, 5.0f), expected(kMostLanes, 0.5f);
  best.resize(2 * kMostLanes, 1.0f);
  expected.resize(2 * kMostLanes, 1.0f);
  std::vector<uint32_t> choices(2 * kMostLanes, 1);
  take_faster(best.data(), choices.data(), rest.data(), again.data(), 0.25f, 2, 1.0f, 2 * kMostLanes);
  EXPECT_EQ(best, expected);
}

}  // namespace
}  // namespace snug::plan::faster_choices_test
