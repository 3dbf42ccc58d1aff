#include "snug/schedule.h"

#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::schedule_test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

template <class Call>
std::string error_of(Call call) {
  try {
    call();
    return "no error";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(WarmupCosine, RisesLinearlyToThePeakAndNeverStartsAtZero) {
  const WarmupCosine schedule{.peak = 8.0, .warmup_steps = 4, .total_steps = 10};
  EXPECT_DOUBLE_EQ(schedule.at(0), 2.0);
  EXPECT_DOUBLE_EQ(schedule.at(1), 4.0);
  EXPECT_DOUBLE_EQ(schedule.at(2), 6.0);
  EXPECT_DOUBLE_EQ(schedule.at(3), 8.0);
  EXPECT_DOUBLE_EQ(schedule.at(4), 8.0);
}

TEST(WarmupCosine, FollowsHalfACosineFromThePeakToTheFloor) {
  // Known values of the cosine at 0, 60, 90 and 120 degrees: 1, 1/2, 0, -1/2.
  const WarmupCosine schedule{.peak = 1.0, .warmup_steps = 10, .total_steps = 130, .floor = 0.2};
  EXPECT_NEAR(schedule.at(10), 1.0, 1e-15);
  EXPECT_NEAR(schedule.at(10 + 40), 0.2 + 0.8 * 0.75, 1e-15);
  EXPECT_NEAR(schedule.at(10 + 60), 0.2 + 0.8 * 0.5, 1e-15);
  EXPECT_NEAR(schedule.at(10 + 80), 0.2 + 0.8 * 0.25, 1e-15);
}

TEST(WarmupCosine, NeverRisesAfterTheWarmUpAndStaysAtTheFloorFromTheEndOn) {
  const WarmupCosine schedule{.peak = 3e-4, .warmup_steps = 5, .total_steps = 100, .floor = 3e-5};
  for (int64_t step = 5; step < 120; ++step) {
    EXPECT_LE(schedule.at(step + 1), schedule.at(step)) << step;
    EXPECT_GE(schedule.at(step), 3e-5) << step;
  }
  EXPECT_GT(schedule.at(99), 3e-5);
  EXPECT_EQ(schedule.at(100), 3e-5);
  EXPECT_EQ(schedule.at(std::numeric_limits<int64_t>::max()), 3e-5);
}

TEST(WarmupCosine, WorksWithoutWarmUpWithNothingElseAndForASingleStep) {
  EXPECT_EQ((WarmupCosine{.peak = 2.0, .total_steps = 10}.at(0)), 2.0);
  const WarmupCosine only_warmup{.peak = 2.0, .warmup_steps = 2, .total_steps = 2};
  EXPECT_EQ(only_warmup.at(0), 1.0);
  EXPECT_EQ(only_warmup.at(1), 2.0);
  EXPECT_EQ(only_warmup.at(2), 0.0);
  EXPECT_EQ((WarmupCosine{.peak = 2.0, .total_steps = 1}.at(0)), 2.0);
}

TEST(WarmupCosine, StaysConstantWhenFloorIsPeak) {
  const WarmupCosine schedule{.peak = 0.5, .total_steps = 7, .floor = 0.5};
  for (int64_t step = 0; step < 10; ++step) {
    EXPECT_EQ(schedule.at(step), 0.5);
  }
}

TEST(WarmupCosine, RejectsFieldsOutOfRangeAndNamesThem) {
  const WarmupCosine good{.peak = 1.0, .warmup_steps = 2, .total_steps = 10, .floor = 0.1};
  EXPECT_EQ(error_of([&] { good.check(); }), "no error");
  const auto expect = [&](const char* field, auto change) {
    WarmupCosine bad = good;
    change(bad);
    const std::string at = error_of([&] { (void)bad.at(0); });
    EXPECT_NE(at.find(std::string("WarmupCosine: ") + field + " is "), std::string::npos) << at;
    EXPECT_EQ(at, error_of([&] { bad.check(); }));
  };
  for (const double peak : {0.0, -1.0, kNan, kInf}) {
    expect("peak", [&](WarmupCosine& bad) { bad.peak = peak; });
  }
  for (const double floor : {-0.1, 1.5, kNan, kInf}) {
    expect("floor", [&](WarmupCosine& bad) { bad.floor = floor; });
  }
  expect("total_steps", [](WarmupCosine& bad) { bad.total_steps = 0; });
  expect("warmup_steps", [](WarmupCosine& bad) { bad.warmup_steps = 11; });
  expect("warmup_steps", [](WarmupCosine& bad) { bad.warmup_steps = -1; });
  EXPECT_NE(error_of([&] { (void)good.at(-1); }).find("step is -1"), std::string::npos);
}

}  // namespace
}  // namespace snug::schedule_test
