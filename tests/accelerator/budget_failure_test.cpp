// Steps under a plan on an accelerator of which one allocation is refused, wherever it is.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/offload.h"
#include "snug/plan.h"
#include "snug/stepper.h"
#include "src/memory/saved_tensor_policy.h"
#include "src/planner/simulator.h"
#include "src/remat/profile_step.h"
#include "tests/accelerator/offload_plans.h"
#include "tests/accelerator/planned_on_device.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/planned_step.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/tensors.h"

namespace snug::accelerator_budget_failure_test {
namespace {

using plan::Simulator;
using plan::Stay;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using testing::same_bits;
using torch::Tensor;
using namespace testing::planned_on_device;

testing::AllocationSweep on_the_device(bool is_thinned) {
  return {.is_thinned = is_thinned, .device = device().type()};
}

// Whether the allocator keeps limits, or operators do.
class BudgetOnAnAcceleratorFails : public ::testing::TestWithParam<bool> {
  void SetUp() override { SNUG_SKIP_UNLESS_SIMULATED(); }
  sim_device::WithCap cap_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(OfAllocatorOrOperators, BudgetOnAnAcceleratorFails, ::testing::Bool());

TEST_P(BudgetOnAnAcceleratorFails, AndMakesTheStepAgainOrLeavesEverythingWhicheverAllocationItIs) {
  const Batch batch = device_batch(256);
  const auto make = [] { return on_device(testing::make_mlp({32, 64, 64, 32}, 0.1)); };
  StepperOptions options{.micro_batch = 256};
  const int64_t plain = plain_bytes(batch, options, make);
  const auto seed_of = [](int step) { torch::manual_seed(static_cast<uint64_t>(100 + step)); };
  PlannedTraining reference(options, make());
  std::vector<std::vector<Tensor>> after;
  for (int i = 0; i < 2; ++i) {
    seed_of(i);
    reference.step(batch);
    after.push_back(reference.state());
  }
  seed_of(1);
  const Tensor first_numbers = torch::rand({2}, device());
  const auto rise_of = [&](const std::function<void(PlannedTraining&)>& second_step) {
    const int64_t before = live();
    options.budget.memory = Bytes(before + plain * 8 / 10);
    PlannedTraining run(options, make());
    seed_of(0);
    run.step(batch);
    EXPECT_TRUE(run.stepper.plan()->activations) << "something is rebuilt";
    seed_of(1);
    second_step(run);
    EXPECT_TRUE(same_bits(run.state(), after[1]));
    return live() - before;
  };
  const int64_t rise = rise_of([&](PlannedTraining& run) { run.step(batch); });
  int64_t again = 0, dropped = 0;
  for_each_failing_allocation(on_the_device(true), [&](FailingAllocation& allocation) {
    const int64_t found = rise_of([&](PlannedTraining& run) {
      if (allocation.stops<BudgetExceeded>([&] { again += run.step(batch).step_downs; })) {
        ++dropped;
        ASSERT_TRUE(same_bits(run.state(), after[0]));
        ASSERT_TRUE(same_bits(torch::rand({2}, device()), first_numbers)) << "generators";
        seed_of(1);
        run.step(batch);
      }
    });
    ASSERT_EQ(found, rise);
  });
  EXPECT_GT(again, 5);
}

// A loop of one's own: backward runs on the device's thread, and so does what the plan rebuilds or SaveOnHost brings
// back.
struct Loop {
  nn::Sequential model = on_device(testing::make_mlp({32, 64, 64, 64, 32}, 0.1));
  Batch batch = device_batch(128);

  Tensor loss() { return (model->forward(batch[0]) - batch[1]).pow(2).sum(); }
  void zero_grad() { model->zero_grad(); }
};

void expect_nothing_left_wherever_it_fails(Loop& loop, const std::function<Tensor()>& forward) {
  detail::install_engine();
  const auto gradients = [&] {
    loop.zero_grad();
    torch::manual_seed(5);
    forward().backward();
    return testing::gradients_of(*loop.model);
  };
  const std::vector<Tensor> expected = gradients();
  loop.zero_grad();
  const int64_t before = live();
  int64_t stopped = 0;
  for_each_failing_allocation(on_the_device(false), [&](FailingAllocation& allocation) {
    torch::manual_seed(5);
    if (allocation.stops([&] { forward().backward(); })) {
      ++stopped;
      loop.zero_grad();
      ASSERT_EQ(live(), before);
    }
    ASSERT_TRUE(same_bits(gradients(), expected));
    loop.zero_grad();
    ASSERT_EQ(live(), before);
  });
  EXPECT_GT(stopped, 20);
}

TEST(FailuresOnDeviceThreads, LeaveNothingOfAPlan) {
  Loop loop;
  ActivationPlan plan = plan_activations([&] { return loop.loss(); }, Bytes::unlimited());
  plan = plan_activations([&] { return loop.loss(); }, Bytes(plan.plain_peak_bytes * 7 / 10));
  EXPECT_GT(plan.predicted_seconds, plan.plain_seconds) << "something is rebuilt";
  expect_nothing_left_wherever_it_fails(loop, [&] {
    const Rematerialize scope(plan);
    return loop.loss();
  });
}

ActivationPlan offloading(Loop& loop, Stay way) {
  const Simulator simulator(
      detail::profile_step([&] { return loop.loss(); }, {.link = testing::offload_plans::link()}));
  return testing::plan_of(simulator, testing::offload_plans::all_leaving(simulator.profile(), way)).value();
}

TEST(FailuresOnDeviceThreads, LeaveNothingOfAPlanThatOffloads) {
  for (const Stay way : {Stay::offloaded(), Stay::streamed()}) {
    Loop loop;
    const ActivationPlan plan = offloading(loop, way);
    expect_nothing_left_wherever_it_fails(loop, [&] {
      const Rematerialize scope(plan);
      return loop.loss();
    });
  }
}

TEST(FailuresOnDeviceThreads, KeepOnTheDeviceWhatFindsNoPinnedMemory) {
  for (const Stay way : {Stay::offloaded(), Stay::streamed()}) {
    Loop loop;
    const ActivationPlan plan = offloading(loop, way);
    const auto gradients = [&](bool is_planned) {
      loop.zero_grad();
      torch::manual_seed(5);
      std::optional<Rematerialize> scope;
      if (is_planned) {
        scope.emplace(plan);
      }
      const Tensor loss = loop.loss();
      scope.reset();
      loss.backward();
      return testing::gradients_of(*loop.model);
    };
    const std::vector<Tensor> expected = gradients(false);
    sim_device::fail_pinned_after(1);
    EXPECT_TRUE(same_bits(gradients(true), expected));
    EXPECT_EQ(sim_device::fail_pinned_after(0), 0);
    EXPECT_GT(plan.offloaded().failed_writes, 0);
    EXPECT_TRUE(same_bits(gradients(true), expected));
  }
}

TEST(FailuresOnDeviceThreads, LeaveNothingOfWhatIsBroughtBack) {
  Loop loop;
  expect_nothing_left_wherever_it_fails(loop, [&] {
    const SaveOnHost scope;
    return loop.loss();
  });
}

// 300 gradients of the cosines wait for those of the sines, of which one fails. The device's thread has them.
TEST(FailuresOnDeviceThreads, LeaveNoGradientOnItsWayOnceTheErrorIsKnown) {
  detail::install_engine();
  const Tensor x = torch::randn({64}, device()).requires_grad_();
  std::vector<Tensor> values, terms;
  for (int i = 0; i < 300; ++i) {
    values.push_back(x.exp());
  }
  for (const auto& of : {&torch::sin, &torch::cos}) {
    for (const Tensor& value : values) {
      terms.push_back(of(value).sum());
    }
  }
  Tensor loss = terms.front();
  for (const Tensor& term : terms) {
    loss = loss + term;
  }
  const int64_t before = live();
  for (int round = 0; round < 20; ++round) {
    FailingAllocation allocation(910, device().type());
    const bool is_stopped = allocation.stops([&] { loss.backward({}, /*retain_graph=*/true); });
    ASSERT_EQ(live(), before) << "round " << round;
    ASSERT_TRUE(is_stopped);
  }
}

}  // namespace
}  // namespace snug::accelerator_budget_failure_test
