#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/memory/limit.h"
#include "snug/optim/adamw.h"
#include "snug/optim/clip.h"
#include "snug/precision/autocast.h"
#include "snug/step/stepper.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

// What a step that runs out of memory leaves alive: nothing.

namespace snug::stepper_allocation_failure_test {
namespace {

using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using torch::Tensor;

// Two heads on one trunk: when backward fails in one of them, gradients of the other may be on their way.
struct TwoHeadsImpl : torch::nn::Module {
  torch::nn::Linear trunk{6, 64}, first{64, 3}, second{64, 3};
  TwoHeadsImpl() {
    register_module("trunk", trunk);
    register_module("first", first);
    register_module("second", second);
  }
  Tensor loss(const Batch& batch) {
    const Tensor hidden = torch::gelu(trunk->forward(batch[0]));
    const Tensor regression = (first->forward(hidden.sin()) - batch[1]).pow(2).sum();
    return regression + torch::log_softmax(second->forward(hidden.tanh()), 1).select(1, 0).neg().sum();
  }
};
TORCH_MODULE(TwoHeads);

TEST(StepperFailure, WhicheverAllocationOfAModelWithTwoHeadsFailsNoMemoryOfTheStepStaysAlive) {
  torch::manual_seed(2);
  const Batch batch{torch::randn({32, 6}), torch::randn({32, 3})};
  for (const bool has_budget : {false, true}) {
    torch::manual_seed(1);
    TwoHeads model;
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.0));
    StepperOptions options;
    if (has_budget) {
      options.memory_budget = Bytes(live_bytes(torch::kCPU).count() + (1 << 20));
    }
    Stepper stepper(model, optimizer, options);
    const auto step = [&] {
      stepper.step(batch, [&](const Batch& micro) { return Loss::sum(model->loss(micro), micro[1].numel()); });
    };
    step();
    const int64_t failures = for_each_failing_allocation([&](FailingAllocation& allocation) {
      model->zero_grad();
      const int64_t before = live_bytes(torch::kCPU).count();
      has_budget ? allocation.stops<BudgetExceeded>(step) : allocation.stops(step);
      model->zero_grad();
      ASSERT_EQ(live_bytes(torch::kCPU).count(), before);
    });
    EXPECT_GT(failures, 30);
  }
}

}  // namespace
}  // namespace snug::stepper_allocation_failure_test
