#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/optim/adamw.h"
#include "snug/optim/adamw8bit.h"
#include "snug/optim/sgd.h"
#include "snug/step/stepper.h"
#include "tests/step/planned_training.h"
#include "tests/support/tensors.h"

// A Stepper with a memory_budget and a model with state of its own, which planning runs several times.

namespace snug::stepper_plan_state_test {
namespace {

using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;
using namespace testing::planned;

// Goes on, in each forward pass, from where the last one ended.
struct CarryImpl : torch::nn::Module {
  explicit CarryImpl(bool by_buffer) : is_in_buffer(by_buffer) {
    cell = register_module("cell", torch::nn::Linear(kWidth, kWidth));
    hidden = torch::zeros({64, kWidth});
    if (is_in_buffer) {
      register_buffer("hidden", hidden);
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor h = hidden.clone();
    for (int i = 0; i < 6; ++i) {
      h = torch::sigmoid(cell(h) + x);
    }
    const torch::NoGradGuard no_grad;
    if (is_in_buffer) {
      hidden.copy_(h);
    } else {
      hidden = h.detach();
    }
    return h;
  }
  bool is_in_buffer;
  torch::nn::Linear cell{nullptr};
  Tensor hidden;
};
TORCH_MODULE(Carry);

std::vector<double> losses_of_carry(bool is_in_buffer, Bytes budget) {
  torch::manual_seed(1);
  Carry model(is_in_buffer);
  SGD optimizer(model->parameters(), {.lr = 0.1});
  const std::vector<Tensor> before = clones_of(model->parameters());
  Stepper stepper(model, optimizer, {.micro_batch = 64, .memory_budget = budget});
  std::vector<double> losses;
  for (uint64_t i = 0; i < 3; ++i) {
    try {
      const StepResult result = stepper.step(make_batch(64, i), [&](const Batch& micro) {
        return Loss::sum((model->forward(micro[0]) - micro[1]).square().sum(), micro[1].numel());
      });
      losses.push_back(result.loss());
    } catch (const ConfigError&) {
      EXPECT_TRUE(losses.empty() && same_bits(model->parameters(), before)) << "before anything is trained";
      throw;
    }
  }
  return losses;
}

TEST(StepperPlan, RefusesAModelWhoseOwnStatePlanningMovesOn) {
  EXPECT_THAT(error_of<ConfigError>([] { losses_of_carry(/*is_in_buffer=*/false, Bytes(live() + (1 << 20))); }),
              HasSubstr("hidden state in a member"));
}

TEST(StepperPlan, LeavesStateInABufferAsItWas) {
  EXPECT_EQ(losses_of_carry(/*is_in_buffer=*/true, Bytes(live() + (1 << 20))),
            losses_of_carry(/*is_in_buffer=*/true, Bytes::unlimited()));
}

// Two networks with one optimizer, of which each step trains the one. What is saved takes most of the memory.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(bool has_other) : trained(very_deep()) {
    register_module("trained", trained);
    if (has_other) {
      other = register_module("other", torch::nn::Linear(kWidth, 512));
    }
  }
  torch::nn::Sequential trained;
  torch::nn::Linear other{nullptr};
};
TORCH_MODULE(Pair);

template <class Optimizer, class Options>
void expect_that_state_of_the_other_is_not_counted(Options of_optimizer) {
  const Batch batch = make_batch(4096);
  const auto peak_bytes = [&](bool has_other, Bytes budget) {
    const int64_t before = live();
    Pair model(has_other);
    Optimizer optimizer(model->parameters(), of_optimizer);
    const int64_t other = live() - before;
    Stepper stepper(model, optimizer, {.micro_batch = 4096, .memory_budget = budget});
    int calls = 0;
    const auto step = [&] {
      stepper.step(batch, [&](const Batch& micro) {
        ++calls;
        return Loss::sum((model->trained->forward(micro[0]) - micro[1]).square().sum(), micro[1].numel());
      });
    };
    step();
    const int64_t peak = stepper.plan()->choice.peak_bytes - other;
    calls = 0;
    step();
    EXPECT_EQ(calls, 1) << "the plan stays";
    return peak;
  };
  const int64_t alone = peak_bytes(false, Bytes(live() + (64 << 20)));
  EXPECT_EQ(peak_bytes(true, Bytes(live() + (64 << 20))), alone);
}

TEST(StepperPlan, DoesNotCountStateOfParametersThatGetNoGradient) {
  expect_that_state_of_the_other_is_not_counted<AdamW>(AdamWOptions{.lr = 0.01});
  expect_that_state_of_the_other_is_not_counted<AdamW8bit>(AdamW8bitOptions{.lr = 0.01});
  expect_that_state_of_the_other_is_not_counted<SGD>(SGDOptions{.lr = 0.01, .momentum = 0.9});
  expect_that_state_of_the_other_is_not_counted<torch::optim::Adam>(torch::optim::AdamOptions(0.01));
}

}  // namespace
}  // namespace snug::stepper_plan_state_test
