#include "snug/optim/lr_schedule.h"

#include <cmath>
#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/io/stateful.h"
#include "snug/optim/adamw.h"
#include "snug/optim/plateau.h"
#include "snug/optim/schedule.h"
#include "tests/support/tensors.h"

namespace snug::lr_schedule_test {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;

torch::optim::OptimizerParamGroup group(double lr) {
  return {{torch::ones({2}, torch::requires_grad())}, std::make_unique<SGDOptions>(lr)};
}

SGD sgd(const std::vector<double>& rates) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double lr : rates) {
    groups.push_back(group(lr));
  }
  return SGD(groups, SGDOptions(rates.front()));
}

std::vector<double> rates_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (auto& each : optimizer.param_groups()) {
    rates.push_back(each.options().get_lr());
  }
  return rates;
}

double halving(int64_t step) { return std::ldexp(16.0, -static_cast<int>(step)); }

TEST(LrSchedule, SetsTheRateOfStepZeroAtOnceAndThenThatOfEachNextStep) {
  SGD optimizer = sgd({0.1});
  LrSchedule schedule(optimizer, halving);
  EXPECT_THAT(rates_of(optimizer), ElementsAre(16.0));
  schedule.step();
  EXPECT_THAT(rates_of(optimizer), ElementsAre(8.0));
  schedule.step();
  EXPECT_THAT(rates_of(optimizer), ElementsAre(4.0));
  EXPECT_EQ(schedule.lr(), 4.0);
  EXPECT_EQ(schedule.steps(), 2);
}

TEST(LrSchedule, DoesNotCountStepsThatWereSkipped) {
  SGD optimizer = sgd({0.1});
  LrSchedule schedule(optimizer, halving);
  schedule.step(false);
  schedule.step(true);
  schedule.step(false);
  EXPECT_THAT(rates_of(optimizer), ElementsAre(8.0));
  EXPECT_EQ(schedule.steps(), 1);
}

TEST(LrSchedule, KeepsTheRatiosBetweenGroups) {
  SGD optimizer = sgd({0.5, 0.125, 0.0, 2.0});
  LrSchedule schedule(optimizer, halving);
  EXPECT_THAT(rates_of(optimizer), ElementsAre(16.0, 4.0, 0.0, 64.0));
  schedule.step();
  EXPECT_THAT(rates_of(optimizer), ElementsAre(8.0, 2.0, 0.0, 32.0));
}

TEST(LrSchedule, TakesTheSchedulesAndAnyOptimizer) {
  const WarmupCosine cosine{.peak = 0.3, .warmup_steps = 2, .total_steps = 9};
  const std::vector<torch::Tensor> parameters{torch::ones({2}, torch::requires_grad())};
  torch::optim::AdamW adamw(parameters);
  torch::optim::LBFGS lbfgs(parameters);
  torch::optim::RMSprop rmsprop(parameters);
  torch::optim::Adagrad adagrad(parameters);
  AdamW ours(parameters);
  for (torch::optim::Optimizer* optimizer :
       std::vector<torch::optim::Optimizer*>{&adamw, &lbfgs, &rmsprop, &adagrad, &ours}) {
    LrSchedule schedule(*optimizer, cosine);
    for (int64_t step = 0; step < 10; ++step) {
      EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), cosine.at(step));
      schedule.step();
    }
  }
  EXPECT_THROW(LrSchedule(adamw, WarmupCosine{.peak = 1}), ConfigError);
}

TEST(LrSchedule, GoesOnFromItsStateEvenWhereTheRateHadBecomeZero) {
  const auto to_zero = [](int64_t step) { return step == 3 ? 0.0 : 5.0 - static_cast<double>(step); };
  SGD first = sgd({1.0, 0.1}), second = sgd({7.0, 7.0});
  LrSchedule saved(first, to_zero), loaded(second, to_zero);
  for (int step = 0; step < 3; ++step) {
    saved.step();
  }
  EXPECT_THAT(rates_of(first), ElementsAre(0.0, 0.0));
  stateful(loaded).load(stateful(saved).state());
  EXPECT_EQ(rates_of(second), rates_of(first));
  saved.step();
  loaded.step();
  EXPECT_EQ(rates_of(second), rates_of(first));
  EXPECT_THAT(rates_of(second), ElementsAre(1.0, 0.1));
}

TEST(LrSchedule, RefusesStatesOfOtherOptimizersAndDamagedOnes) {
  SGD two = sgd({1.0, 0.5}), one = sgd({1.0});
  LrSchedule of_two(two, halving), of_one(one, halving);
  of_one.step();
  const auto refusal = [&](const StateDict& state) {
    return error_of<CorruptFile>([&] { of_one.load_state_dict(state); });
  };
  EXPECT_THAT(refusal(of_two.state_dict()), HasSubstr("1 parameter groups"));
  EXPECT_THAT(refusal({}), HasSubstr("steps"));
  StateDict state = of_one.state_dict();
  state.set("steps", int64_t{-1});
  EXPECT_THAT(refusal(state), HasSubstr("steps is -1"));
  state = of_one.state_dict();
  state.set("factors", torch::tensor({-1.0}, torch::kDouble));
  EXPECT_THAT(refusal(state), HasSubstr("negative"));
  state.set("factors", torch::tensor({1.0f}));
  EXPECT_THAT(refusal(state), HasSubstr("Float"));
  EXPECT_THAT(rates_of(one), ElementsAre(8.0));
  EXPECT_EQ(of_one.steps(), 1);
}

TEST(LrSchedule, RefusesRatesAndGroupsThatCannotWork) {
  SGD optimizer = sgd({1.0});
  EXPECT_THAT(error_of<ConfigError>([&] { LrSchedule(optimizer, [](int64_t) { return -1.0; }); }),
              HasSubstr("step 0 is -1"));
  EXPECT_THROW(LrSchedule(optimizer, std::function<double(int64_t)>()), ConfigError);
  SGD zero = sgd({0.0, 1.0});
  EXPECT_THAT(error_of<ConfigError>([&] { LrSchedule(zero, halving); }), HasSubstr("group 0 has the learning rate 0"));

  LrSchedule schedule(optimizer, [](int64_t step) { return step == 0 ? 2.0 : std::nan(""); });
  EXPECT_THAT(error_of<ConfigError>([&] { schedule.step(); }), HasSubstr("step 1 is nan"));
  EXPECT_EQ(schedule.steps(), 0);
  EXPECT_THAT(rates_of(optimizer), ElementsAre(2.0));
  optimizer.add_param_group(group(1.0));
  EXPECT_THAT(error_of<ConfigError>([&] { schedule.step(); }), HasSubstr("had 1 parameter groups and now has 2"));
}

TEST(ReduceOnPlateau, ReducesAfterMoreThanPatienceMetricsWithoutProgress) {
  SGD optimizer = sgd({1.0, 0.5});
  ReduceOnPlateau plateau(optimizer, {.factor = 0.5, .patience = 2});
  EXPECT_FALSE(plateau.step(3.0));
  EXPECT_FALSE(plateau.step(3.0));
  EXPECT_FALSE(plateau.step(2.9999)) << "less than a ten-thousandth better is no progress";
  EXPECT_TRUE(plateau.step(std::nan("")));
  EXPECT_THAT(rates_of(optimizer), ElementsAre(0.5, 0.25));
  EXPECT_EQ(plateau.best(), 3.0);
  EXPECT_FALSE(plateau.step(1.0));
  EXPECT_EQ(plateau.best(), 1.0);
}

TEST(ReduceOnPlateau, CountsNothingDuringTheCooldownAndStopsAtTheLeastRate) {
  SGD optimizer = sgd({1.0});
  ReduceOnPlateau plateau(
      optimizer, {.mode = PlateauOptions::Mode::Max, .factor = 0.5, .patience = 0, .cooldown = 2, .min_lr = 0.4});
  EXPECT_FALSE(plateau.step(1.0));
  EXPECT_TRUE(plateau.step(0.5));
  EXPECT_FALSE(plateau.step(0.5));
  EXPECT_FALSE(plateau.step(0.5));
  EXPECT_TRUE(plateau.step(0.5));
  EXPECT_THAT(rates_of(optimizer), ElementsAre(0.4));
}

TEST(ReduceOnPlateau, GoesOnFromItsStateAtEveryPoint) {
  const PlateauOptions options{.factor = 0.5, .patience = 1, .cooldown = 2};
  const std::vector<double> metrics{1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.6, 0.6, 0.6, 0.6};
  for (size_t point = 0; point <= metrics.size(); ++point) {  // before the first the best is infinite
    SGD first = sgd({1.0});
    ReduceOnPlateau saved(first, options);
    for (size_t i = 0; i < point; ++i) {
      saved.step(metrics[i]);
    }
    SGD second = sgd(rates_of(first));
    ReduceOnPlateau loaded(second, options);
    stateful(loaded).load(stateful(saved).state());
    EXPECT_EQ(loaded.best(), saved.best());
    for (size_t i = point; i < metrics.size(); ++i) {
      EXPECT_EQ(loaded.step(metrics[i]), saved.step(metrics[i])) << point << " " << i;
    }
    EXPECT_EQ(rates_of(second), rates_of(first));
    EXPECT_LT(rates_of(first)[0], 0.5);
  }
}

TEST(ReduceOnPlateau, RefusesDamagedStates) {
  SGD optimizer = sgd({1.0});
  ReduceOnPlateau plateau(optimizer);
  plateau.step(2.0);
  StateDict bad = plateau.state_dict();
  bad.set("best", 1.0);
  bad.set("num_bad_epochs", int64_t{-2});
  EXPECT_THAT(error_of<CorruptFile>([&] { plateau.load_state_dict(bad); }), HasSubstr("num_bad_epochs is -2"));
  EXPECT_THROW(plateau.load_state_dict({}), CorruptFile);
  EXPECT_EQ(plateau.best(), 2.0);
}

TEST(ReduceOnPlateau, RejectsOptionsOutOfRangeAndNamesThem) {
  SGD optimizer = sgd({1.0});
  const auto refusal = [&](PlateauOptions options) {
    return error_of<ConfigError>([&] { ReduceOnPlateau plateau(optimizer, options); });
  };
  EXPECT_THAT(refusal({.factor = 1.0}), HasSubstr("factor is 1"));
  EXPECT_THAT(refusal({.factor = 0.0}), HasSubstr("factor is 0"));
  EXPECT_THAT(refusal({.patience = -1}), HasSubstr("patience is -1"));
  EXPECT_THAT(refusal({.threshold = -1}), HasSubstr("threshold is -1"));
  EXPECT_THAT(refusal({.cooldown = -1}), HasSubstr("cooldown is -1"));
  EXPECT_THAT(refusal({.min_lr = std::nan("")}), HasSubstr("min_lr is nan"));
  EXPECT_THAT(refusal({.eps = -1}), HasSubstr("eps is -1"));
  EXPECT_THAT(refusal({.mode = static_cast<PlateauOptions::Mode>(5)}), HasSubstr("mode is 5"));
}

}  // namespace
}  // namespace snug::lr_schedule_test
