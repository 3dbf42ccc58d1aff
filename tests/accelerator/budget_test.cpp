// A Stepper with a memory budget on an accelerator: the budget holds, and the steps are those of plain training there.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/stepper.h"
#include "tests/accelerator/planned_on_device.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/tensors.h"

namespace snug::accelerator_budget_test {
namespace {

using testing::same_bits;
using torch::Tensor;
using namespace testing::planned_on_device;

// Whether the allocator keeps limits, or operators do.
class BudgetOnAnAccelerator : public ::testing::TestWithParam<bool> {
  void SetUp() override {
    if (!GetParam() && !sim_device::is_present()) {
      GTEST_SKIP() << "CUDA's allocator keeps limits";
    }
  }
  sim_device::WithCap cap_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(OfAllocatorOrOperators, BudgetOnAnAccelerator, ::testing::Bool());

void expect_as_planned(const StepResult& result, const Stepper& stepper, int64_t budget) {
  const auto plan = stepper.plan();
  ASSERT_TRUE(plan);
  EXPECT_LE(plan->choice.peak_bytes, budget);
  EXPECT_LE(result.peak_bytes, plan->choice.peak_bytes);
  EXPECT_EQ(result.step_downs, 0);
  EXPECT_EQ(result.plan_deviation, "");
}

TEST_P(BudgetOnAnAccelerator, IsKeptWithTheBitsOfPlainTraining) {
  const Batch batch = device_batch(items(512));
  for (const double dropout : {0.0, 0.2}) {
    const auto make = [&] { return deep(dropout); };
    const int64_t plain = plain_bytes(batch, {}, make);
    for (const int64_t percent : {90, 60, 50}) {
      SCOPED_TRACE(::testing::Message() << percent << " % of plain training, dropout " << dropout);
      PlannedTraining reference({}, make());
      torch::manual_seed(11);
      for (int i = 0; i < 3; ++i) {
        reference.step(batch);
      }
      const auto expected = reference.state();
      const Tensor next = torch::rand({3}, device());
      const int64_t budget = live() + plain * percent / 100;
      PlannedTraining run({.micro_batch = items(512), .budget = {.memory = Bytes(budget)}}, make());
      torch::manual_seed(11);
      for (int i = 0; i < 3; ++i) {
        // Room for scalars, which are not all alive at the peak, and on a GPU for gaps.
        const int64_t room = sim_device::is_present() ? 64 << 10 : 32 << 20;
        const StepResult result = run.step(batch);
        expect_as_planned(result, run.stepper, budget);
        EXPECT_TRUE(run.stepper.plan()->activations);
        EXPECT_TRUE(i == 0 || result.peak_bytes > run.stepper.plan()->choice.peak_bytes - room)
            << "with the optimizer's state it is predicted closely";
      }
      EXPECT_TRUE(same_bits(torch::rand({3}, device()), next));
      EXPECT_TRUE(same_bits(run.state(), expected));
    }
  }
}

// In fewer bytes than plans without a link can reach.
TEST_P(BudgetOnAnAccelerator, OffloadsToPinnedMemoryOfTheHost) {
  const Batch batch = device_batch(items(512));
  const StepperOptions whole{.micro_batch = items(512)};
  StepperOptions options{.micro_batch = items(512), .budget = {.offload = std::filesystem::path()}};
  const auto make = [] { return deep(0.1); };
  const int64_t rebuilding = smallest_bytes(batch, whole, make), offloading = smallest_bytes(batch, options, make);
  ASSERT_LT(offloading, rebuilding);
  PlannedTraining reference(whole, make());
  torch::manual_seed(11);
  for (int i = 0; i < 3; ++i) {
    reference.step(batch);
  }
  const auto expected = reference.state();
  const int64_t budget = live() + offloading;
  options.budget.memory = Bytes(budget);
  PlannedTraining run(options, make());
  torch::manual_seed(11);
  for (int i = 0; i < 3; ++i) {
    expect_as_planned(run.step(batch), run.stepper, budget);
  }
  EXPECT_GT(run.stepper.plan()->activations->offloaded().bytes_back, 0);
  EXPECT_TRUE(same_bits(run.state(), expected));
}

TEST_P(BudgetOnAnAccelerator, ChoosesAMicroBatchOfABatchOnTheHost) {
  const Batch batch = testing::planned::make_batch(items(512));
  const int64_t smallest = smallest_bytes(batch, {}, [] { return deep(); });
  const int64_t budget = live() + smallest + smallest / 4;
  PlannedTraining run({.budget = {.memory = Bytes(budget)}}, deep());
  StepResult result = run.step(batch);
  const int64_t chosen = run.stepper.plan()->choice.items;
  EXPECT_LT(chosen, items(512));
  EXPECT_EQ(result.micro_batches, (items(512) + chosen - 1) / chosen);
  expect_as_planned(result, run.stepper, budget);
  result = run.step(batch);
  PlannedTraining reference({.micro_batch = chosen}, deep());
  reference.step(batch);
  EXPECT_EQ(reference.step(batch).loss(), result.loss());
  EXPECT_TRUE(same_bits(run.state(), reference.state()));
}

TEST_P(BudgetOnAnAccelerator, ThatIsTooSmallNamesOneThatWouldDo) {
  const Batch batch = device_batch(items(512));
  const StepperOptions whole{.micro_batch = items(512)};
  const int64_t smallest = smallest_bytes(batch, whole, [] { return deep(); });
  StepperOptions options = whole;
  options.budget.memory = Bytes(live() + smallest);
  PlannedTraining run(options, deep());
  for (int i = 0; i < 2; ++i) {
    EXPECT_LE(run.step(batch).peak_bytes, options.budget.memory.count());
  }
}

TEST_P(BudgetOnAnAccelerator, IsALimitWhereNothingIsPlanned) {
  const Batch batch = device_batch(items(512));
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  PlannedTraining run({.budget = {.memory = Bytes(live() + plain * 6 / 10), .plan = false}}, deep());
  const std::vector<Tensor> before = run.state();
  EXPECT_THROW(run.step(batch), BudgetExceeded);
  EXPECT_EQ(run.calls, 1);
  EXPECT_TRUE(same_bits(run.state(), before));
}

// From the third step on there is less room than was planned for.
TEST_P(BudgetOnAnAccelerator, MakesAStepAgainThatTakesMoreThanPlanned) {
  const Batch batch = device_batch(items(512));
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  const int64_t budget = live() + plain * 8 / 10;
  PlannedTraining run({.micro_batch = items(512), .budget = {.memory = Bytes(budget)}}, deep());
  PlannedTraining reference({}, deep());
  const int64_t unplanned_bytes = plain / (sim_device::is_present() ? 20 : 8);
  int64_t again = 0;
  for (int i = 0; i < 4; ++i) {
    Tensor unplanned;
    const StepResult result = run.stepper.step(batch, [&](const Batch& micro) {
      unplanned.reset();
      unplanned = i < 2 ? Tensor() : torch::empty({unplanned_bytes}, torch::dtype(torch::kUInt8).device(device()));
      return run.loss_of(micro);
    });
    again += result.step_downs;
    EXPECT_LE(result.peak_bytes, budget);
    reference.step(batch);
  }
  EXPECT_GT(again, 0);
  EXPECT_TRUE(same_bits(run.state(), reference.state()));
}

TEST_P(BudgetOnAnAccelerator, HoldsForBatchesOfTwoShapes) {
  const Batch whole = device_batch(items(512)), part = device_batch(items(384));
  const std::vector<Batch> batches{whole, {part[0].view({items(96), 4, -1}), part[1].view({items(96), 4, -1})}};
  const int64_t plain = plain_bytes(whole, {}, [] { return deep(0.1); });
  PlannedTraining reference({}, deep(0.1));
  for (size_t i = 0; i < 6; ++i) {
    torch::manual_seed(i);
    reference.step(batches[i % 2]);
  }
  const int64_t budget = live() + plain * 6 / 10;
  PlannedTraining run({.micro_batch = items(512), .budget = {.memory = Bytes(budget)}}, deep(0.1));
  for (size_t i = 0; i < 6; ++i) {
    const int calls = run.calls;
    torch::manual_seed(i);
    expect_as_planned(run.step(batches[i % 2]), run.stepper, budget);
    EXPECT_EQ(run.calls == calls + 1, i >= 2) << "planned once for each shape";
  }
  EXPECT_TRUE(same_bits(run.state(), reference.state()));
}

TEST_P(BudgetOnAnAccelerator, GoesWithOtherOptions) {
  const Batch batch = device_batch(items(512));
  GradScalerOptions scaler{.init_scale = 1024, .growth_interval = 1};
  const std::vector<std::pair<const char*, StepperOptions>> cases = {
      {"float16 and clipping",
       {.precision = Precision::Float16,
        .micro_batch = items(512),
        .clip_norm = 0.1,
        .sixteen_bit = {.scaler = scaler}}},
      {"bfloat16 in parts", {.precision = Precision::BFloat16, .micro_batch = items(128), .clip_norm = 0.1}},
  };
  for (const auto& [name, plain_options] : cases) {
    SCOPED_TRACE(name);
    StepperOptions options = plain_options;
    const auto make = [] { return deep(0.1); };
    const int64_t plain = plain_bytes(batch, options, make);
    const auto train = [&](PlannedTraining& run) {
      std::vector<double> seen;
      for (int i = 0; i < 3; ++i) {
        torch::manual_seed(static_cast<uint64_t>(i));
        const StepResult result = run.step(batch);
        EXPECT_EQ(result.step_downs, 0);
        EXPECT_TRUE(options.budget.memory.is_unlimited() || result.peak_bytes <= options.budget.memory.count());
        seen.insert(seen.end(), {result.loss(), result.grad_norm(), result.scale()});
      }
      return seen;
    };
    PlannedTraining reference(options, make());
    const std::vector<double> expected = train(reference);
    options.budget.memory = Bytes(live() + plain * 8 / 10);
    PlannedTraining run(options, make());
    EXPECT_EQ(train(run), expected);
    EXPECT_TRUE(same_bits(run.state(), reference.state()));
    EXPECT_TRUE(run.stepper.plan()->activations);
  }
}

TEST_P(BudgetOnAnAccelerator, HoldsWhereALoaderYieldsMicroBatches) {
  const Batch batch = device_batch(items(256));
  const auto train = [&](StepperOptions options) {
    options.accumulate.every = 2;
    PlannedTraining run(options, deep());
    int64_t peak = 0;
    for (int i = 0; i < 4; ++i) {
      if (const auto result = run.stepper.accumulate(batch, [&](const Batch& micro) { return run.loss_of(micro); })) {
        peak = std::max(peak, result->peak_bytes);
        EXPECT_EQ(result->step_downs, 0);
      }
    }
    return std::pair(run.state(), peak);
  };
  const int64_t before = live();
  const auto [expected, plain] = train({});
  const int64_t budget = live() + (plain - before) * 8 / 10;
  const auto [found, peak] = train({.budget = {.memory = Bytes(budget)}});
  EXPECT_LE(peak, budget);
  EXPECT_TRUE(same_bits(found, expected));
}

TEST_P(BudgetOnAnAccelerator, CarriesStateFromStepToStep) {
  const Batch batch = device_batch(items(512));
  const auto train = [&](StepperOptions options, int64_t* bytes) {
    PlannedTraining run(options, deep());
    Tensor level = torch::zeros({}, device());
    options.budget.carried = {&level};
    Stepper stepper(run.model, run.optimizer, options);
    for (int i = 0; i < 3; ++i) {
      const StepResult result = stepper.step(batch, [&](const Batch& micro) {
        const Tensor y = run.model->forward(micro[0]);
        const Tensor before = std::exchange(level, y.detach().mean());
        return Loss::sum((y - micro[1] - before).pow(2).sum(), micro[1].numel());
      });
      *bytes = result.peak_bytes;
    }
    auto state = run.state();
    state.push_back(level);
    return state;
  };
  const int64_t before = live();
  int64_t plain = 0, peak = 0;
  const auto expected = train({}, &plain);
  const int64_t budget = live() + (plain - before) * 7 / 10;
  EXPECT_TRUE(same_bits(train({.budget = {.memory = Bytes(budget)}}, &peak), expected));
  EXPECT_LE(peak, budget);
}

}  // namespace
}  // namespace snug::accelerator_budget_test
