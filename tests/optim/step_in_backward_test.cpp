#include "snug/step_in_backward.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "src/memory/peak_watch.h"
#include "tests/support/freezing.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::step_in_backward_test {
namespace {

using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using testing::tiny_batch;
using testing::tiny_model;

torch::Tensor loss_of(torch::nn::Sequential& model, const Batch& batch) {
  return (model->forward(batch[0]) - batch[1]).square().mean();
}

TEST(StepInBackward, GivesTheBitsOfBackwardAndStep) {
  auto plain = tiny_model();
  auto early = tiny_model();
  AdamW plain_optimizer(plain->parameters(), {.lr = 0.01});
  AdamW early_optimizer(early->parameters(), {.lr = 0.01});
  const StepInBackward in_backward(early_optimizer);
  for (uint64_t i = 0; i < 20; ++i) {
    const Batch batch = tiny_batch(8, i);
    plain_optimizer.zero_grad();
    loss_of(plain, batch).backward();
    plain_optimizer.step();
    loss_of(early, batch).backward();
    for (const auto& parameter : early->parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
  }
  EXPECT_TRUE(same_bits(clones_of(early->parameters()), clones_of(plain->parameters())));
}

TEST(StepInBackward, LeavesWhatIsFrozenAloneAndTrainsWhatIsUnfrozen) {
  auto plain = tiny_model();
  auto early = tiny_model();
  testing::freeze_for(1, *early);
  AdamW plain_optimizer(plain->parameters(), {.lr = 0.01});
  AdamW early_optimizer(early->parameters(), {.lr = 0.01});
  const StepInBackward in_backward(early_optimizer);
  for (int step = 0; step < testing::kFreezingSteps; ++step) {
    testing::freeze_for(step, *plain);
    testing::freeze_for(step, *early);
    const Batch batch = tiny_batch(8, static_cast<uint64_t>(step));
    plain_optimizer.zero_grad();
    loss_of(plain, batch).backward();
    plain_optimizer.step();
    loss_of(early, batch).backward();
  }
  EXPECT_TRUE(same_bits(clones_of(early->parameters()), clones_of(plain->parameters())));
}

// Ten layers of 1 MiB: together their gradients are 10 MiB, one at a time 1.
TEST(StepInBackward, HoldsOneGradientAtATime) {
  constexpr int64_t kWidth = 512;
  const auto rise = [&](bool early) {
    torch::manual_seed(1);
    torch::nn::Sequential model;
    for (int i = 0; i < 10; ++i) {
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    }
    SGD optimizer(model->parameters(), {.lr = 0.01});
    std::optional<StepInBackward> in_backward;
    if (early) {
      in_backward.emplace(optimizer);
    }
    const auto loss = model->forward(torch::ones({1, kWidth})).sum();
    const int64_t before = live_bytes(torch::kCPU).count();
    const detail::PeakWatch watch(torch::kCPU);
    loss.backward();
    if (!early) {
      optimizer.step();
    }
    return watch.peak() - before;
  };
  constexpr int64_t kGradient = kWidth * kWidth * 4;
  EXPECT_GE(rise(false), 9 * kGradient);
  EXPECT_LE(rise(true), 2 * kGradient);
}

TEST(StepInBackward, UpdatesASharedParameterOnceWithItsWholeGradient) {
  const auto weight_after = [](bool early) {
    const auto weight = torch::ones({2}, torch::requires_grad());
    SGD optimizer({weight}, {.lr = 1});
    std::optional<StepInBackward> in_backward;
    if (early) {
      in_backward.emplace(optimizer);
    }
    (weight * 2 + weight.square() * 3).sum().backward();
    if (!early) {
      optimizer.step();
    }
    return weight.detach().clone();
  };
  EXPECT_TRUE(same_bits(weight_after(true), weight_after(false)));
}

TEST(StepInBackward, EndsWithItsScope) {
  const auto weight = torch::ones({2}, torch::requires_grad());
  SGD optimizer({weight}, {.lr = 1});
  {
    const StepInBackward in_backward(optimizer);
  }
  weight.sum().backward();
  EXPECT_TRUE(weight.grad().defined());
  EXPECT_TRUE(torch::equal(weight, torch::ones({2})));
}

TEST(StepInBackward, RefusesASecondOneAndAStepper) {
  auto model = tiny_model();
  SGD optimizer(model->parameters(), {.lr = 0.1});
  const StepInBackward in_backward(optimizer);
  EXPECT_THAT(error_of<ConfigError>([&] { StepInBackward second(optimizer); }), HasSubstr("another StepInBackward"));
  Stepper stepper(model, optimizer);
  EXPECT_THAT(error_of<ConfigError>([&] {
                stepper.step(tiny_batch(4), [&](const Batch& micro) {
                  return testing::squared_error(model->forward(micro[0]), micro[1]);
                });
              }),
              HasSubstr("was written inside"));
}

TEST(StepInBackward, TakesAnOptimizerWhoseFirstGroupIsEmpty) {
  const auto weight = torch::ones({2}, torch::requires_grad());
  SGD optimizer(
      std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(std::vector<torch::Tensor>{}),
                                                     torch::optim::OptimizerParamGroup(std::vector{weight})},
      {.lr = 0.5});
  const StepInBackward in_backward(optimizer);
  weight.sum().backward();
  EXPECT_TRUE(torch::equal(weight, torch::full({2}, 0.5f)));
}

}  // namespace
}  // namespace snug::step_in_backward_test
