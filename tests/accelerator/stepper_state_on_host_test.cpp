// A Stepper whose plans may put the state of its optimizer on the host, for a model on an accelerator.

#include <exception>
#include <filesystem>
#include <string>
#include <utility>
#include <variant>

#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/stepper.h"
#include "tests/accelerator/planned_on_device.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug::stepper_state_on_host_test {
namespace {

using ::testing::AllOf;
using testing::bits_of;
using testing::FailingAllocation;
using ::testing::HasSubstr;
using torch::Tensor;
using namespace testing::planned_on_device;

// 1.1 MiB of weights, as much of gradients, and twice that of AdamW's state. Activations of 16 items are small.
nn::Sequential wide(c10::Device where = device()) {
  auto model = testing::make_mlp({32, 512, 512, 32});
  testing::move_to(*model, where);
  return model;
}
const int64_t kState = 2 * 4 * (32 * 512 + 512 + 512 * 512 + 512 + 512 * 32 + 32);

// Above what is alive: too little for the state beside weights and gradients.
Bytes tight() { return Bytes(live() + 5 * kState / 4); }

StepperOptions options(Bytes budget) {
  return {.micro_batch = 16, .budget = {.memory = budget, .offload = std::filesystem::path()}};
}

bool is_on_host(const FusedOptimizer& optimizer) {
  return std::holds_alternative<StateOnHost>(optimizer.state_placement());
}

std::string plain_training(const Batch& batch, int steps) {
  PlannedTraining plain({}, wide());
  for (int step = 0; step < steps; ++step) {
    plain.step(batch);
  }
  return bits_of(plain.state());
}

// The simulated accelerator has the CPU's kernels.
class StepperStateOnHost : public ::testing::Test {
  void SetUp() override { SNUG_SKIP_UNLESS_SIMULATED(); }
};

TEST_F(StepperStateOnHost, TrainsWhatFitsOnlySoWithThePredictedPeak) {
  const Batch batch = device_batch(16);
  const std::string expected = plain_training(batch, 5);
  const int64_t before = live();
  PlannedTraining outside(options(tight()), wide());
  for (int step = 0; step < 5; ++step) {
    const StepResult result = outside.step(batch);
    const int64_t predicted = outside.stepper.plan()->choice.peak_bytes;
    EXPECT_LE(result.peak_bytes, predicted);
    EXPECT_GT(result.peak_bytes, predicted - (48 << 10)) << "room for scalars, which are not all alive at the peak";
    EXPECT_EQ(result.step_downs, 0);
  }
  EXPECT_TRUE(is_on_host(outside.optimizer));
  EXPECT_LT(live() - before, kState * 5 / 4) << "weights and gradients";
  EXPECT_TRUE(bits_of(outside.state()) == expected);
  const StepPlan plan = *outside.stepper.plan();
  EXPECT_EQ(plan.placement, (Placement{.state = Place::Host}));
  EXPECT_GE(plan.bytes.optimizer_state.outside, kState);
  EXPECT_EQ(plan.bytes.optimizer_state.in_memory, 0);
  EXPECT_THAT(plan.explain(), AllOf(HasSubstr("on the host"), HasSubstr("nothing fits in memory")));
  EXPECT_THAT(plan.verdict(), HasSubstr("state goes to the host's memory"));
  EXPECT_EQ(StepPlan::from_json(plan.to_json()).placement, plan.placement);
}

TEST_F(StepperStateOnHost, StaysInMemoryWhereEverythingFits) {
  const Batch batch = device_batch(16);
  const std::string expected = plain_training(batch, 3);
  PlannedTraining run(options(Bytes(live() + 4 * kState)), wide());
  for (int step = 0; step < 3; ++step) {
    run.step(batch);
  }
  EXPECT_FALSE(is_on_host(run.optimizer));
  EXPECT_EQ(run.stepper.plan()->placement, Placement());
  EXPECT_TRUE(bits_of(run.state()) == expected);
}

// Although the step is slower so: with the state on the host, nothing would have to be rebuilt.
TEST_F(StepperStateOnHost, StaysInMemoryWhereBothPlacesFit) {
  const Batch batch = device_batch(512);
  const auto make = [] { return wide(); };
  StepperOptions with{.micro_batch = 512};
  const int64_t smallest = smallest_bytes(batch, with, make), plain = plain_bytes(batch, with, make);
  ASSERT_LT(smallest, plain);
  with.budget = {.memory = Bytes(live() + smallest + (plain - smallest) / 4), .offload = std::filesystem::path()};
  PlannedTraining run(with, wide());
  run.step(batch);
  EXPECT_FALSE(is_on_host(run.optimizer));
  const StepPlan plan = *run.stepper.plan();
  EXPECT_EQ(plan.placement, Placement());
  EXPECT_TRUE(plan.activations.has_value());
  EXPECT_THAT(plan.explain(), HasSubstr("is in memory; the host gets it only if nothing fits in memory"));
}

TEST_F(StepperStateOnHost, IsInPlansThatAreReadBack) {
  const testing::TemporaryFolder plans;
  const Batch batch = device_batch(16);
  for (const bool is_read : {false, true}) {
    StepperOptions with = options(tight());
    with.budget.plan_folder = plans.path();
    PlannedTraining training(with, wide());
    training.step(batch);
    EXPECT_EQ(training.calls == 1, is_read) << "nothing is tried";
    EXPECT_EQ(training.stepper.plan()->placement.state, Place::Host);
    EXPECT_TRUE(is_on_host(training.optimizer));
  }
}

TEST_F(StepperStateOnHost, MakesTheStepOrLeavesEverythingWhicheverAllocationIsRefused) {
  const Batch batch = device_batch(16);
  const std::string before = plain_training(batch, 1), after = plain_training(batch, 2);
  testing::for_each_failing_allocation({.is_thinned = true, .device = device().type()},
                                       [&](FailingAllocation& allocation) {
                                         PlannedTraining run(options(tight()), wide());
                                         run.step(batch);
                                         ASSERT_TRUE(is_on_host(run.optimizer));
                                         try {
                                           allocation.arm();
                                           const auto disarm = c10::make_scope_exit([&] { allocation.disarm(); });
                                           run.step(batch);
                                         } catch (const std::exception&) {  // BudgetExceeded, or out of memory
                                           ASSERT_TRUE(bits_of(run.state()) == before);
                                           run.step(batch);
                                         }
                                         ASSERT_TRUE(bits_of(run.state()) == after);
                                       });
}

// Another plan is no cure for it.
TEST_F(StepperStateOnHost, KeepsThePlanWhereTheHostHasNoMemory) {
  const Batch batch = device_batch(16);
  PlannedTraining run(options(tight()), wide());
  run.step(batch);
  const std::string before = bits_of(run.state()), plan = run.stepper.plan()->to_json();
  sim_device::fail_pinned_after(1);
  EXPECT_THAT(testing::error_of<Error>([&] { run.step(batch); }), HasSubstr("the host has too little memory"));
  EXPECT_EQ(sim_device::fail_pinned_after(0), 0);
  EXPECT_TRUE(bits_of(run.state()) == before);
  EXPECT_EQ(run.step(batch).step_downs, 0);
  EXPECT_EQ(run.stepper.plan()->to_json(), plan);
  EXPECT_TRUE(bits_of(run.state()) == plain_training(batch, 2));
}

TEST_F(StepperStateOnHost, IsNotCountedAsTheDevicesIfTheProgramHasPutItThere) {
  const Batch batch = device_batch(16);
  const StepperOptions with{.micro_batch = 16, .budget = {.memory = Bytes(live() + 4 * kState)}};
  PlannedTraining run(with, wide());
  run.optimizer.keep_state_in(StateOnHost{});
  run.step(batch);
  Stepper again(run.model, run.optimizer, with);
  again.step(batch, [&](const Batch& micro) { return run.loss_of(micro); });
  const BytesByKind bytes = again.plan()->bytes;
  EXPECT_EQ(bytes.optimizer_state.in_memory, 0);
  EXPECT_GE(bytes.optimizer_state.outside, kState);
}

// The device's kernels would take a workspace for BF16 weights. The CPU's kernels take none of the device's memory.
TEST_F(StepperStateOnHost, TakesNoWorkspaceOfTheDeviceIfTheProgramHasPutItThere) {
  const Batch batch = {device_batch(16)[0].to(torch::kBFloat16), device_batch(16)[1].to(torch::kBFloat16)};
  const auto peak = [&](const StatePlacement& place) {
    nn::Sequential model = wide(torch::kCPU);
    model->to(torch::kBFloat16);
    testing::move_to(*model, device());
    AdamW optimizer(model->parameters(), {.lr = 0.01, .master_weights = true});
    optimizer.keep_state_in(place);
    const int64_t workspace = optimizer.workspace_bytes();
    Stepper stepper(model, optimizer, {.micro_batch = 16, .budget = {.memory = Bytes(live() + 8 * kState)}});
    stepper.step(batch, [&](const Batch& micro) {
      return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
    });
    return std::pair(stepper.plan()->choice.peak_bytes, workspace);
  };
  const auto [in_memory, workspace] = peak(StateOnDevice());
  EXPECT_LE(peak(StateOnHost()).first, in_memory - workspace - kState);
}

// Its kernel runs on the CPU only, so its state is never in memory, however large the budget is.
TEST_F(StepperStateOnHost, ComesToAdamW8bit) {
  const Batch here = testing::planned::make_batch(16), there = device_batch(16);
  const auto train = [](nn::Sequential model, const Batch& batch, const StepperOptions& with) {
    AdamW8bit optimizer(model->parameters(), {.lr = 0.01});
    Stepper stepper(model, optimizer, with);
    for (int step = 0; step < 3; ++step) {
      stepper.step(batch, [&](const Batch& micro) {
        return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
      });
    }
    EXPECT_EQ(is_on_host(optimizer), !model->parameters()[0].is_cpu());
    if (is_on_host(optimizer)) {
      EXPECT_THAT(stepper.plan()->explain(), HasSubstr("its optimizer cannot update it in memory"));
    }
    return bits_of(model->parameters());
  };
  const std::string expected = train(wide(torch::kCPU), here, {.micro_batch = 16});
  EXPECT_TRUE(train(wide(), there, options(Bytes(live() + 4 * kState))) == expected);
}

}  // namespace
}  // namespace snug::stepper_state_on_host_test
