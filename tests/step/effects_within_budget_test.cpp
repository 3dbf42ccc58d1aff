// What is noted of a planned step, so that it can be taken back, is within what was planned for: the peak is no higher
// than predicted, and a step that is made again does not count its copies twice.

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "tests/step/planned_training.h"
#include "tests/support/failing_allocations.h"

namespace snug::effects_within_budget_test {
namespace {

using testing::FailingAllocation;
using torch::Tensor;
using namespace testing::planned;

const Bytes kPlenty = Bytes::parse("64MiB");

using LossOf = std::function<Loss(nn::Sequential& model, const Batch& micro)>;

// Of steps of several micro-batches, within so many percent of what plain training takes above what is alive before.
void expect_the_peak_predicted(const LossOf& loss_of, int64_t percent = 100) {
  constexpr int64_t kMicroBatches = 8, kItems = 128;
  nn::Sequential model = testing::make_mlp({kWidth, 256, 256, 256, 256, kWidth});
  SGD optimizer(model->parameters(), {.lr = 0.1});
  const Batch batch = make_batch(kMicroBatches * kItems);
  const auto loss = [&](const Batch& micro) { return loss_of(model, micro); };
  StepperOptions options{.micro_batch = kItems, .budget = {.memory = Bytes(live() + kPlenty.count())}};
  if (percent < 100) {
    const int64_t before = live();
    Stepper plain(model, optimizer, options);
    const int64_t room = plain.plan_for(batch, loss)->choice.peak_bytes - before;
    options.budget.memory = Bytes(before + room * percent / 100);
  }
  Stepper stepper(model, optimizer, options);
  for (int i = 0; i < 2; ++i) {
    const StepResult result = stepper.step(batch, loss);
    EXPECT_EQ(result.micro_batches, kMicroBatches);
    EXPECT_LE(result.peak_bytes, stepper.plan()->choice.peak_bytes);
    EXPECT_EQ(result.step_downs, 0);
  }
  EXPECT_EQ(stepper.plan()->activations.has_value(), percent < 100);
}

TEST(EffectsWithinBudget, LeavesOfALossEndWithTheirMicroBatch) {
  for (const int64_t percent : {100, 80}) {
    SCOPED_TRACE(percent);
    const auto loss_of = [](nn::Sequential& model, const Batch& micro) {
      const Tensor h = model->forward(micro[0]);
      const Tensor z = h.detach().requires_grad_();
      (z - micro[1]).square().mean().backward();
      return Loss::mean((h * z.grad()).sum(), micro.size());
    };
    expect_the_peak_predicted(loss_of, percent);
  }
}

TEST(EffectsWithinBudget, AdversarialInputsEndWithTheirMicroBatch) {
  expect_the_peak_predicted([](nn::Sequential& model, const Batch& micro) {
    const Tensor x = micro[0].clone().requires_grad_();
    torch::mse_loss(model->forward(x), micro[1]).backward({}, /*retain_graph=*/false, /*create_graph=*/false, {x});
    const Tensor moved = x.detach() + 0.01 * x.grad().sign();
    return Loss::mean(torch::mse_loss(model->forward(moved), micro[1]), micro.size());
  });
}

TEST(EffectsWithinBudget, GradientsAreNotCopiedWhereTheLastMicroBatchHasNoItems) {
  nn::Sequential model = testing::make_mlp({kWidth, kWidth});
  const Tensor wide = model->register_parameter("wide", torch::randn({1 << 20}));
  SGD optimizer(model->parameters(), {.lr = 0.1});
  const Batch batch = make_batch(4 * 8);
  Stepper stepper(model, optimizer, {.micro_batch = 8, .budget = {.memory = Bytes(live() + kPlenty.count())}});
  std::vector<Tensor> fillers;  // so that no gradient comes to lie where a result of the forward pass has lain
  for (int i = 0; i < 2; ++i) {
    int64_t padding = 0;
    const StepResult result = stepper.step(batch, [&](const Batch& micro) {
      const bool is_padding = micro[0].storage_offset() == 3 * 8 * kWidth;
      padding += is_padding ? micro.size() : 0;
      const Tensor loss = torch::mse_loss(model->forward(micro[0]), micro[1]) + 1e-3 * wide.sum();
      fillers.clear();
      for (int k = 0; k < 256; ++k) {
        fillers.push_back(torch::empty({0}));
      }
      return Loss::mean(loss, is_padding ? 0 : micro.size());
    });
    EXPECT_EQ(padding, 8);
    EXPECT_EQ(result.items, 24);
    EXPECT_LE(result.peak_bytes, stepper.plan()->choice.peak_bytes);
  }
}

// 4 MiB, which each forward pass writes, beside a small model.
struct WrittenImpl : torch::nn::Module {
  WrittenImpl() {
    body = register_module("body", testing::make_mlp({kWidth, 128, 128, kWidth}));
    state = register_buffer("state", torch::ones({1 << 20}));
  }
  Tensor forward(const Tensor& x) {
    const torch::NoGradGuard no_grad;
    state.mul_(2);
    const torch::AutoGradMode grad(true);
    return body->forward(x);
  }
  nn::Sequential body{nullptr};
  Tensor state;
};
TORCH_MODULE(Written);

struct WrittenRun {
  Written model;
  SGD optimizer{model->parameters(), {.lr = 0.1}};
  Stepper stepper;
  bool is_to_fail = false;

  explicit WrittenRun(int64_t room)
      : stepper(model, optimizer, {.micro_batch = 512, .budget = {.memory = Bytes(live() + room)}}) {}

  Loss loss_of(const Batch& micro) {
    const Tensor y = model->forward(micro[0]);
    FailingAllocation next(1);
    if (std::exchange(is_to_fail, false)) {
      next.arm();
    }
    return Loss::mean(torch::mse_loss(y, micro[1]), micro.size());
  }
  StepResult step(const Batch& batch) {
    return stepper.step(batch, [this](const Batch& micro) { return loss_of(micro); });
  }
};

// In its first step, whose plan then leaves more free, and in a later one, which is planned anew.
TEST(EffectsWithinBudget, CopiesAreCountedOnceWhereAStepIsMadeAgain) {
  const Batch batch = make_batch(512);
  const int64_t before = live();
  int64_t room = 0;
  {
    WrittenRun run(kPlenty.count());
    run.stepper.plan_for(batch, [&](const Batch& micro) { return run.loss_of(micro); });
    room = run.stepper.plan()->choice.peak_bytes - live() + (1 << 20);
  }
  ASSERT_EQ(live(), before);
  for (const int which : {0, 1}) {
    SCOPED_TRACE(which);
    WrittenRun run(room);
    run.stepper.plan_for(batch, [&](const Batch& micro) { return run.loss_of(micro); });
    for (int i = 0; i < 3; ++i) {
      run.is_to_fail = i == which;
      const StepResult result = run.step(batch);
      EXPECT_EQ(result.step_downs, i == which ? 1 : 0);
      EXPECT_LE(result.peak_bytes, run.stepper.plan()->budget_bytes);
    }
    EXPECT_TRUE(torch::equal(run.model->state, torch::full({1 << 20}, 8.0)));
  }
}

TEST(EffectsWithinBudget, ATensorThatChangesItsTypeAfterAWriteKeepsItsMemory) {
  nn::Sequential model = testing::make_mlp({kWidth, 64, kWidth});
  SGD optimizer(model->parameters(), {.lr = 0.1});
  Stepper stepper(model, optimizer, {.micro_batch = 64, .budget = {.memory = Bytes(live() + kPlenty.count())}});
  Tensor cache = torch::ones({64});
  const Batch batch = make_batch(64);
  for (int i = 0; i < 2; ++i) {
    stepper.step(batch, [&](const Batch& micro) {
      cache.add_(1);
      cache.set_data(cache.to(cache.scalar_type() == torch::kFloat ? torch::kHalf : torch::kFloat));
      return Loss::mean(torch::mse_loss(model->forward(micro[0]), micro[1]), micro.size());
    });
    ASSERT_EQ(cache.storage().nbytes(), 64 * cache.itemsize());
    EXPECT_TRUE(torch::equal(cache, torch::full({64}, cache[0].item<double>(), cache.scalar_type())));
  }
}

}  // namespace
}  // namespace snug::effects_within_budget_test
