#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/stepper.h"
#include "tests/step/adamw_training.h"
#include "tests/support/failing_allocations.h"

// The state that a step leaves behind when it fails.

namespace snug::stepper_failure_test {
namespace {

using testing::AdamWTraining;
using ::testing::AllOf;
using testing::clones_of;
using testing::error_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::regression_batch;
using testing::same_bits;
using torch::Tensor;

struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(StepperFailure, AnErrorInTheLossLeavesEverythingAsBeforeAndTheNextStepWorks) {
  const Batch batch = regression_batch(8);
  AdamWTraining plain({.precision = Precision::BFloat16, .micro_batch = 2});
  AdamWTraining run({.precision = Precision::BFloat16, .micro_batch = 2});
  plain.step(batch);
  run.step(batch);
  const auto before = run.state();
  int calls = 0;
  EXPECT_EQ(error_of<Broken>([&] {
              run.stepper.step(batch, [&](const Batch& micro) {
                if (++calls == 3) {
                  throw Broken("in the third");
                }
                return run.loss_of(micro);
              });
            }),
            "in the third");
  EXPECT_TRUE(same_bits(run.state(), before));
  for (const Tensor& gradient : gradients_of(*run.model)) {
    EXPECT_FALSE(gradient.defined()) << "half a gradient must not be left";
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(torch::kCPU));
  plain.step(batch);
  run.step(batch);
  EXPECT_TRUE(same_bits(run.state(), plain.state()));
}

TEST(StepperFailure, AnErrorWhileAccumulatingDropsTheWindow) {
  const Batch batch = regression_batch(6);
  const auto parts = micro_batches(batch, 2);
  AdamWTraining run({.accumulate = {.every = 3}});
  const auto before = run.state();
  run.accumulate(parts[0]);
  EXPECT_THROW(run.stepper.accumulate(parts[1], [](const Batch&) -> Loss { throw Broken("now"); }), Broken);
  EXPECT_TRUE(same_bits(run.state(), before));
  EXPECT_FALSE(run.stepper.flush()) << "there is no window any more";
  run.accumulate(parts[0]);
  EXPECT_THROW(run.accumulate(batch.slice(0, 0)), ConfigError);
  EXPECT_FALSE(run.stepper.flush()) << "an empty micro-batch is an error, too";
  AdamWTraining fresh({.accumulate = {.every = 3}});
  for (const Batch& part : parts) {
    run.accumulate(part);
    fresh.accumulate(part);
  }
  EXPECT_TRUE(same_bits(run.state(), fresh.state()));
}

TEST(StepperFailure, AWriteInsideTheWindowIsAnErrorThatNamesTheParameter) {
  const Batch batch = regression_batch(6);
  const auto parts = micro_batches(batch, 2);
  const auto write = [](const AdamWTraining& run) {
    const torch::NoGradGuard no_grad;
    run.model->parameters()[2].add_(1);
  };
  const auto writing_loss = [&](AdamWTraining& run) {
    return [&](const Batch& micro) {
      const Loss loss = run.loss_of(micro);
      write(run);
      return loss;
    };
  };
  AdamWTraining in_step({.micro_batch = 2});
  EXPECT_THAT(error_of<ConfigError>([&] { in_step.stepper.step(batch, writing_loss(in_step)); }),
              HasSubstr("'2.weight'"));
  EXPECT_TRUE(in_step.step(batch).stepped());

  AdamWTraining between({.accumulate = {.every = 3}});
  between.accumulate(parts[0]);
  write(between);
  EXPECT_THAT(error_of<ConfigError>([&] { between.accumulate(parts[1]); }), HasSubstr("'2.weight'"));
  for (const Batch& part : parts) {
    between.accumulate(part);
  }

  AdamWTraining before_flush({.accumulate = {.every = 3}});
  before_flush.accumulate(parts[0]);
  before_flush.optimizer.step();  // the mistake that this check is for
  EXPECT_THAT(error_of<ConfigError>([&] { before_flush.stepper.flush(); }), HasSubstr("'0.weight'"));
}

TEST(StepperFailure, CallsThatDoNotBelongInAnOpenWindowAreErrors) {
  const Batch batch = regression_batch(4);
  AdamWTraining run({.accumulate = {.every = 2}});
  run.accumulate(batch);
  EXPECT_THROW(run.step(batch), ConfigError);
  EXPECT_TRUE(run.accumulate(batch)) << "the window is still good";
}

TEST(StepperFailure, AnEmptyBatchIsAnError) {
  AdamWTraining run;
  EXPECT_THROW(run.step(regression_batch(0)), ConfigError);
  EXPECT_THROW(run.accumulate(regression_batch(0)), ConfigError);
}

// --- budgets

TEST(StepperFailure, ABudgetBelowWhatIsAliveAlreadyIsBudgetExceededWithBothNumbers) {
  const auto budget = Bytes(live_bytes(torch::kCPU).count() + (1 << 20));
  AdamWTraining run({.budget = {.memory = budget}});
  const auto before = run.state();
  const Tensor ballast = torch::zeros({1 << 20});
  EXPECT_THAT(error_of<BudgetExceeded>([&] { run.step(regression_batch(4)); }),
              AllOf(HasSubstr(live_bytes(torch::kCPU).str()), HasSubstr(budget.str())));
  EXPECT_TRUE(same_bits(run.state(), before));
  EXPECT_THROW(AdamWTraining({.budget = {.memory = budget}}), BudgetExceeded) << "known before the first step";
}

TEST(StepperFailure, ABudgetThatIsTooSmallChangesNothing) {
  const Batch batch = testing::tiny_batch(4096);
  auto model = testing::tiny_model();
  AdamW optimizer(model->parameters());
  const auto before = clones_of(model->parameters());
  const auto loss_of = [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); };
  const Bytes budget(live_bytes(torch::kCPU).count() + 300'000);
  Stepper whole(model, optimizer, {.budget = {.memory = budget, .plan = false}});
  EXPECT_THROW(whole.step(batch, loss_of), BudgetExceeded);
  EXPECT_TRUE(same_bits(clones_of(model->parameters()), before));
  EXPECT_TRUE(optimizer.state().empty());
  Stepper parts(model, optimizer, {.micro_batch = 64, .budget = {.memory = budget, .plan = false}});
  const auto result = parts.step(batch, loss_of);
  EXPECT_TRUE(result.stepped());
  EXPECT_LE(result.peak_bytes, budget.count());
}

TEST(StepperFailure, ABudgetThatIsTooSmallLeavesTheScalerAsItWasAndALargerOneWorks) {
  const Batch batch = regression_batch(64);
  const StepperOptions options{.precision = Precision::Float16,
                               .sixteen_bit = {.scaler = {.init_scale = 256, .growth_interval = 1}}};
  auto tight_options = options;
  AdamWTraining run(options);
  run.step(batch);
  EXPECT_EQ(run.stepper.scaler().get_scale(), 512.0);
  const StateDict scaler = run.stepper.state_dict();
  const auto before = run.state();

  tight_options.budget.memory = Bytes(live_bytes(torch::kCPU).count() + 4096);
  Stepper tight(run.model, run.optimizer, tight_options);
  tight.load_state_dict(scaler);
  const auto loss_of = [&](const Batch& micro) { return run.loss_of(micro); };
  EXPECT_THAT(error_of<BudgetExceeded>([&] { tight.step(batch, loss_of); }), HasSubstr("memory budget"));
  EXPECT_TRUE(same_bits(run.state(), before));
  EXPECT_EQ(tight.scaler().get_scale(), 512.0);
  EXPECT_EQ(tight.state_dict().get<StateDict>("scaler").get<int64_t>("_growth_tracker"), 0);
  EXPECT_NO_THROW(torch::empty({1 << 16})) << "the budget holds inside the step only";

  AdamWTraining reference(options);
  reference.step(batch);
  reference.step(batch);
  run.step(batch);
  EXPECT_TRUE(same_bits(run.state(), reference.state()));
}

TEST(StepperFailure, ABudgetHoldsForAccumulatedMicroBatchesToo) {
  const auto parts = micro_batches(regression_batch(256), 128);
  AdamWTraining run({.budget = {.memory = Bytes(live_bytes(torch::kCPU).count() + 8192)}, .accumulate = {.every = 2}});
  EXPECT_THROW(run.accumulate(parts[0]), BudgetExceeded);
  EXPECT_FALSE(run.stepper.flush());
}

// --- each allocation in turn

// Whichever allocation of a step fails: nothing has changed, or the step was made as a whole; and then it goes on.
TEST(StepperFailure, WhicheverAllocationFailsTheStateIsTheOldOneOrTheWholeNewOne) {
  const Batch batch = regression_batch(5);
  const GradScalerOptions plain{.init_scale = 8, .growth_interval = 1};
  const GradScalerOptions full{.init_scale = 8, .growth_interval = 1, .min_scale = 1, .hysteresis = 2};
  for (const auto& [precision, scaler] :
       {std::pair{Precision::Float32, plain}, {Precision::Float16, plain}, {Precision::Float16, full}}) {
    const StepperOptions options{
        .precision = precision, .micro_batch = 2, .clip_norm = 0.1, .sixteen_bit = {.scaler = scaler}};
    for (const int steps_before : {0, 1}) {
      AdamWTraining reference(options);
      for (int i = 0; i < steps_before; ++i) {
        reference.step(batch);
      }
      const auto old = reference.state();
      const double old_scale = reference.stepper.scaler().get_scale();
      reference.step(batch);
      const auto fresh = reference.state();
      const double new_scale = reference.stepper.scaler().get_scale();
      reference.step(batch);
      const auto next = reference.state();
      const int64_t failures = for_each_failing_allocation([&](FailingAllocation& allocation) {
        AdamWTraining run(options);
        for (int i = 0; i < steps_before; ++i) {
          run.step(batch);
        }
        const bool failed = allocation.stops([&] { run.step(batch); });
        const bool stepped = !failed || !same_bits(clones_of(run.model->parameters()), {old.begin(), old.begin() + 4});
        ASSERT_TRUE(same_bits(run.state(), stepped ? fresh : old));
        ASSERT_EQ(run.stepper.scaler().get_scale(), stepped ? new_scale : old_scale);
        if (!stepped) {
          run.step(batch);
          ASSERT_TRUE(same_bits(run.state(), fresh));
        }
        run.step(batch);
        ASSERT_TRUE(same_bits(run.state(), next));
      });
      EXPECT_GT(failures, 50);
    }
  }
}

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
      options.budget.memory = Bytes(live_bytes(torch::kCPU).count() + (1 << 20));
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
}  // namespace snug::stepper_failure_test
