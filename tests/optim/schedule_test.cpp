#include "snug/optim/schedule.h"

#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "snug/core/error.h"

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

TEST(WarmupLinear, RisesToThePeakAndFallsInAStraightLineToTheFloor) {
  const WarmupLinear schedule{.peak = 8.0, .warmup_steps = 4, .total_steps = 10, .floor = 2.0};
  EXPECT_DOUBLE_EQ(schedule.at(0), 2.0);
  EXPECT_DOUBLE_EQ(schedule.at(3), 8.0);
  EXPECT_DOUBLE_EQ(schedule.at(4), 8.0);
  EXPECT_DOUBLE_EQ(schedule.at(5), 7.0);
  EXPECT_DOUBLE_EQ(schedule.at(9), 3.0);
  EXPECT_EQ(schedule.at(10), 2.0);
  EXPECT_EQ(schedule.at(std::numeric_limits<int64_t>::max()), 2.0);
  EXPECT_EQ((WarmupLinear{.peak = 2.0, .warmup_steps = 2, .total_steps = 2}.at(2)), 0.0);
}

TEST(WarmupConstant, RisesToThePeakAndStaysThere) {
  EXPECT_EQ((WarmupConstant{.peak = 3.0}.at(0)), 3.0);
  const WarmupConstant schedule{.peak = 3.0, .warmup_steps = 3};
  EXPECT_DOUBLE_EQ(schedule.at(0), 1.0);
  EXPECT_DOUBLE_EQ(schedule.at(2), 3.0);
  EXPECT_EQ(schedule.at(std::numeric_limits<int64_t>::max()), 3.0);
}

TEST(StepDecay, MultipliesByGammaEverySoManySteps) {
  const StepDecay schedule{.initial = 8.0, .every = 3, .gamma = 0.5};
  EXPECT_EQ(schedule.at(0), 8.0);
  EXPECT_EQ(schedule.at(2), 8.0);
  EXPECT_EQ(schedule.at(3), 4.0);
  EXPECT_EQ(schedule.at(8), 2.0);
  EXPECT_EQ(schedule.at(9), 1.0);
  EXPECT_EQ((StepDecay{.initial = 8.0, .every = 1, .gamma = 1.0}.at(1000)), 8.0);
}

TEST(OneCycle, GoesFromItsFirstRateToThePeakToItsLast) {
  for (const auto anneal : {OneCycle::Anneal::Cosine, OneCycle::Anneal::Linear}) {
    const OneCycle schedule{
        .peak = 10.0, .total_steps = 101, .pct_start = 41.0 / 101, .anneal = anneal, .final_div_factor = 4};
    EXPECT_NEAR(schedule.at(0), 10.0 / 25, 1e-14);
    EXPECT_DOUBLE_EQ(schedule.at(20), (10.0 + 0.4) / 2) << "half way, the cosine and the line meet";
    EXPECT_DOUBLE_EQ(schedule.at(40), 10.0);
    EXPECT_NEAR(schedule.at(70), (10.0 + 0.1) / 2, 1e-14);
    EXPECT_NEAR(schedule.at(100), 0.1, 1e-14);
    EXPECT_EQ(schedule.at(101), schedule.at(100));
    EXPECT_EQ(schedule.at(std::numeric_limits<int64_t>::max()), schedule.at(100));
  }
}

TEST(OneCycle, TurnsInTheQuartersAsItsShapeSays) {
  OneCycle schedule{.peak = 1.0, .total_steps = 61, .pct_start = 1.0, .div_factor = 2.0};
  EXPECT_NEAR(schedule.at(20), 0.5 + 0.5 * 0.25, 1e-15);  // the cosine at 60 degrees is 1/2
  EXPECT_EQ(schedule.at(60), 1.0);
  schedule.anneal = OneCycle::Anneal::Linear;
  EXPECT_NEAR(schedule.at(20), 0.5 + 0.5 / 3, 1e-15);
}

TEST(OneCycle, WithoutARiseBeginsAtOrBelowThePeak) {
  EXPECT_EQ((OneCycle{.peak = 1.0, .total_steps = 10, .pct_start = 0.1}.at(0)), 1.0);  // Python divides by zero here
  const OneCycle falling{.peak = 1.0, .total_steps = 9, .pct_start = 0.0, .anneal = OneCycle::Anneal::Linear};
  EXPECT_NEAR(falling.at(0), 1.0 + (4e-6 - 1.0) / 9, 1e-15);
  EXPECT_NEAR((OneCycle{.peak = 1.0, .total_steps = 1}.at(0)), 4e-6, 1e-15);
}

template <class Schedule, class Change>
void expect_refusal(Schedule bad, const std::string& message, Change change) {
  EXPECT_EQ(error_of([&] { bad.check(); }), "no error");
  change(bad);
  const std::string at = error_of([&] { (void)bad.at(0); });
  EXPECT_NE(at.find(message), std::string::npos) << at;
  EXPECT_EQ(at, error_of([&] { bad.check(); }));
}

TEST(Schedules, RejectFieldsOutOfRangeAndNameThem) {
  const WarmupLinear linear{.peak = 1, .warmup_steps = 2, .total_steps = 10};
  expect_refusal(linear, "WarmupLinear: peak is 0", [](auto& bad) { bad.peak = 0; });
  expect_refusal(linear, "WarmupLinear: floor is 2", [](auto& bad) { bad.floor = 2; });
  expect_refusal(linear, "WarmupLinear: total_steps is 0", [](auto& bad) { bad.total_steps = 0; });
  expect_refusal(linear, "WarmupLinear: warmup_steps is 11", [](auto& bad) { bad.warmup_steps = 11; });
  const WarmupConstant constant{.peak = 1};
  expect_refusal(constant, "WarmupConstant: peak is nan", [](auto& bad) { bad.peak = kNan; });
  expect_refusal(constant, "WarmupConstant: warmup_steps is -1", [](auto& bad) { bad.warmup_steps = -1; });
  const StepDecay step{.initial = 1, .every = 2};
  expect_refusal(step, "StepDecay: initial is inf", [](auto& bad) { bad.initial = kInf; });
  expect_refusal(step, "StepDecay: every is 0", [](auto& bad) { bad.every = 0; });
  expect_refusal(step, "StepDecay: gamma is 0", [](auto& bad) { bad.gamma = 0; });
  expect_refusal(step, "StepDecay: gamma is 1.5", [](auto& bad) { bad.gamma = 1.5; });
  const OneCycle cycle{.peak = 1, .total_steps = 2};
  expect_refusal(cycle, "OneCycle: peak is -1", [](auto& bad) { bad.peak = -1; });
  expect_refusal(cycle, "OneCycle: total_steps is 0", [](auto& bad) { bad.total_steps = 0; });
  expect_refusal(cycle, "OneCycle: pct_start is 1.1", [](auto& bad) { bad.pct_start = 1.1; });
  expect_refusal(cycle, "OneCycle: pct_start is nan", [](auto& bad) { bad.pct_start = kNan; });
  expect_refusal(cycle, "OneCycle: anneal is 7", [](auto& bad) { bad.anneal = static_cast<OneCycle::Anneal>(7); });
  expect_refusal(cycle, "OneCycle: div_factor is 0", [](auto& bad) { bad.div_factor = 0; });
  expect_refusal(cycle, "OneCycle: final_div_factor is inf", [](auto& bad) { bad.final_div_factor = kInf; });
}

TEST(Schedules, CountStepsFromZero) {
  EXPECT_NE(error_of([] { (void)WarmupLinear{.peak = 1, .total_steps = 1}.at(-1); }).find("step is -1"),
            std::string::npos);
  EXPECT_NE(error_of([] { (void)WarmupConstant{.peak = 1}.at(-1); }).find("step is -1"), std::string::npos);
  EXPECT_NE(error_of([] { (void)StepDecay{.initial = 1, .every = 1}.at(-1); }).find("step is -1"), std::string::npos);
  EXPECT_NE(error_of([] { (void)OneCycle{.peak = 1, .total_steps = 1}.at(-1); }).find("step is -1"), std::string::npos);
}

TEST(ScaleLearningRate, MultipliesByTheRatioOfTheBatchesOrItsRoot) {
  EXPECT_DOUBLE_EQ(scale_learning_rate(0.1, 1024, 256, LrScaling::None), 0.1);
  EXPECT_DOUBLE_EQ(scale_learning_rate(0.1, 1024, 256, LrScaling::Linear), 0.4);
  EXPECT_DOUBLE_EQ(scale_learning_rate(0.1, 1024, 256, LrScaling::Sqrt), 0.2);
}

TEST(ScaleLearningRate, LowersTheRateForSmallerBatchesAndKeepsItForTheSame) {
  EXPECT_DOUBLE_EQ(scale_learning_rate(0.4, 16, 64, LrScaling::Linear), 0.1);
  EXPECT_DOUBLE_EQ(scale_learning_rate(0.4, 16, 64, LrScaling::Sqrt), 0.2);
  EXPECT_EQ(scale_learning_rate(0.3, 48, 48, LrScaling::Linear), 0.3);
  EXPECT_EQ(scale_learning_rate(0.3, 48, 48, LrScaling::Sqrt), 0.3);
}

TEST(ScaleLearningRate, RejectsWhatIsNoBatchOrNoRate) {
  const auto error = [](double lr, int64_t batch, int64_t base) {
    return error_of([=] { (void)scale_learning_rate(lr, batch, base, LrScaling::None); });
  };
  EXPECT_NE(error(0.1, 0, 64).find("batch is 0"), std::string::npos);
  EXPECT_NE(error(0.1, 64, -2).find("base_batch is -2"), std::string::npos);
  EXPECT_NE(error(0.0, 64, 64).find("base_lr is 0"), std::string::npos);
  EXPECT_NE(error(kNan, 64, 64).find("base_lr is nan"), std::string::npos);
  EXPECT_THROW((void)scale_learning_rate(0.1, 64, 64, static_cast<LrScaling>(17)), ConfigError);
}

}  // namespace
}  // namespace snug::schedule_test
