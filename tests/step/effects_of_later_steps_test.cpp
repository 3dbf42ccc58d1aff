// What a plan counts of a step's effects holds for all steps: for those whose buffers and gradients begin as nothing,
// and for each micro-batch.

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "tests/step/planned_training.h"
#include "tests/support/tensors.h"

namespace snug::effects_of_later_steps_test {
namespace {

using torch::Tensor;
using namespace testing::planned;

const Bytes kPlenty = Bytes::parse("64MiB");

// A small model, with a loss of the test's.
struct Small {
  using LossOf = std::function<Tensor(nn::Sequential& model, const Batch& micro)>;

  explicit Small(LossOf of_test) : loss(std::move(of_test)) {}

  void begin(int64_t micro_batch, int64_t room) {
    stepper.emplace(model, optimizer,
                    StepperOptions{.micro_batch = micro_batch, .budget = {.memory = Bytes(live() + room)}});
  }
  Loss loss_of(const Batch& micro) { return Loss::mean(loss(model, micro), micro.size()); }
  StepResult step(const Batch& batch) {
    return stepper->step(batch, [this](const Batch& micro) { return loss_of(micro); });
  }
  // Bytes above what is alive, just enough for a step.
  int64_t least_room(const Batch& batch, int64_t micro_batch) {
    const int64_t before = live();
    begin(micro_batch, kPlenty.count());
    stepper->plan_for(batch, [this](const Batch& micro) { return loss_of(micro); });
    const int64_t room = stepper->plan()->choice.peak_bytes - before;
    stepper.reset();
    return room;
  }
  // `copies`: bytes of effects on memory that is gone when the micro-batch ends, which no plan counts.
  void expect_the_peak_predicted(const Batch& batch, int steps, int64_t copies = 0) {
    for (int i = 0; i < steps; ++i) {
      SCOPED_TRACE(i);
      const StepResult result = step(batch);
      EXPECT_LE(result.peak_bytes, stepper->plan()->choice.peak_bytes + copies);
      EXPECT_EQ(result.step_downs, 0);
    }
  }

  LossOf loss;
  nn::Sequential model = testing::make_mlp({kWidth, 128, 128, 128, kWidth});
  SGD optimizer{model->parameters(), {.lr = 0.1}};
  std::optional<Stepper> stepper;
};

TEST(EffectsOfLaterSteps, OnABufferOfZerosAreCountedFromTheBeginning) {
  Tensor state = torch::zeros({1 << 20});
  Small small([&](nn::Sequential& model, const Batch& micro) {
    {
      const torch::NoGradGuard no_grad;
      state.add_(1);
    }
    return torch::mse_loss(model->forward(micro[0]), micro[1]);
  });
  small.model->register_buffer("state", state);
  const Batch batch = make_batch(512);
  small.begin(512, small.least_room(batch, 512));
  small.expect_the_peak_predicted(batch, 3);
}

TEST(EffectsOfLaterSteps, OnAGradientThatStaysAreInTheBudgetThatWouldDo) {
  Tensor other = torch::ones({1 << 20}, torch::requires_grad());
  Small small([&](nn::Sequential& model, const Batch& micro) {
    return torch::mse_loss(model->forward(micro[0]), micro[1]) + 1e-3 * other.mean();
  });
  const Batch batch = make_batch(512);
  small.begin(512, small.least_room(batch, 512));
  small.step(batch);
  Bytes would_do(0);
  try {
    small.step(batch);  // the gradient is there now
  } catch (const BudgetExceeded& error) {
    would_do = error.smallest_feasible();
  }
  ASSERT_GT(would_do.count(), 0);
  small.stepper.reset();
  for (const Tensor& parameter : small.model->parameters()) {
    parameter.mutable_grad().reset();
  }
  small.begin(512, would_do.count() - live());
  EXPECT_NO_THROW(small.step(batch));
}

TEST(EffectsOfLaterSteps, OnMemoryThatIsGoneEndWithTheirMicroBatch) {
  std::vector<float> data(16 * 512 * kWidth, 2.0F);
  Small small([&](nn::Sequential& model, const Batch& micro) {
    const Tensor x = torch::from_blob(data.data() + micro[0][0].item<int64_t>() * kWidth, {micro.size(), kWidth});
    x.div_(2);
    return model->forward(x).square().mean();
  });
  small.begin(512, kPlenty.count());
  small.expect_the_peak_predicted({torch::arange(16 * 512)}, 1, /*copies=*/2 * 512 * kWidth * sizeof(float));
}

TEST(EffectsOfLaterSteps, OnALeafThatBeginsWithAGradientEndWithTheirMicroBatch) {
  Small small([](nn::Sequential& model, const Batch& micro) {
    const Tensor h = model->forward(micro[0]);
    Tensor z = h.detach().requires_grad_();
    z.mutable_grad() = torch::ones_like(z);
    (z - micro[1]).square().mean().backward();
    return (h * z.grad()).sum();
  });
  small.begin(128, kPlenty.count());
  small.expect_the_peak_predicted(make_batch(32 * 128), 1, /*copies=*/3 * 128 * kWidth * sizeof(float));
}

TEST(EffectsOfLaterSteps, DoNotMakeARefusalTheProgramsErrorAboutPartsOfAStep) {
  Small small([](nn::Sequential& model, const Batch& micro) {
    if (micro.size() < 4096) {
      throw ConfigError("a sequence must not be cut");
    }
    return torch::mse_loss(model->forward(micro[0]), micro[1]);
  });
  small.begin(4096, 2 << 20);
  const Batch batch = make_batch(4096);
  EXPECT_THROW(small.step(batch), BudgetExceeded);
}

}  // namespace
}  // namespace snug::effects_of_later_steps_test
