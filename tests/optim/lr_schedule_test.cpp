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

}  // namespace
}  // namespace snug::lr_schedule_test
