#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/snapshot.h"
#include "snug/stepper.h"
#include "src/step/step_planner.h"
#include "tests/step/planned_training.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

// Under a memory budget with offload, whether the optimizer's state is in memory or in a file is a part of the plan.

namespace snug::stepper_state_in_file_test {
namespace {

using ::testing::AllOf;
using testing::bits_of;
using ::testing::HasSubstr;
using testing::is_in_file;
using testing::make_mlp;
using testing::TemporaryFolder;
using testing::planned::live;
using testing::planned::make_batch;
using testing::planned::PlannedTraining;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kMiB = 1 << 20;

// 2.3 MiB of weights, as much of gradients, and twice that of AdamW's state. Activations of 16 items are small.
nn::Sequential wide() { return make_mlp({32, 512, 512, 32}); }
const Bytes kState(2 * 4 * (32 * 512 + 512 + 512 * 512 + 512 + 512 * 32 + 32));

// Above what is alive: too little for the state beside weights and gradients, enough for a window.
Bytes tight() { return Bytes(live() + 3 * kState.count() / 2); }
Bytes ample() { return Bytes(live() + 4 * kState.count()); }

// The micro-batch is given: else measured times choose it.
StepperOptions options(Bytes budget, const TemporaryFolder& folder) {
  return {.micro_batch = 16, .budget = {.memory = budget, .offload = folder.path()}};
}

std::string plain_training(const Batch& batch, int steps) {
  PlannedTraining plain({}, wide());
  for (int step = 0; step < steps; ++step) {
    plain.step(batch);
  }
  return bits_of(plain.state());
}

TEST(StepperStateInFile, TrainsWhatFitsOnlySoWithTheBitsOfPlainTraining) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(16);
  const std::string expected = plain_training(batch, 5);
  const int64_t before = live();
  PlannedTraining outside(options(tight(), folder), wide());
  for (int step = 0; step < 5; ++step) {
    const StepResult result = outside.step(batch);
    EXPECT_LE(result.peak_bytes, outside.stepper.plan()->choice.peak_bytes);
  }
  EXPECT_TRUE(is_in_file(outside.optimizer));
  EXPECT_LT(live() - before, kState.count() * 5 / 4) << "weights and gradients";
  EXPECT_TRUE(bits_of(outside.state()) == expected);
  EXPECT_THAT(outside.stepper.plan()->explain(),
              AllOf(HasSubstr("in a file"), HasSubstr("nothing fits in memory"), HasSubstr(kState.str())));
  EXPECT_THAT(outside.stepper.plan()->verdict(), HasSubstr("state goes to a file"));
}

TEST(StepperStateInFile, StaysInMemoryWhereEverythingFits) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(16);
  const std::string expected = plain_training(batch, 3);
  PlannedTraining run(options(ample(), folder), wide());
  for (int step = 0; step < 3; ++step) {
    run.step(batch);
  }
  EXPECT_FALSE(is_in_file(run.optimizer));
  EXPECT_EQ(run.stepper.plan()->placement.state, Place::Memory);
  EXPECT_THAT(run.stepper.plan()->explain(), HasSubstr("is in memory"));
  EXPECT_TRUE(bits_of(run.state()) == expected);
}

TEST(StepperStateInFile, TheSmallestBudgetThatIsToldWillDo) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(16);
  int refused = 0;
  for (int sixteenths = 8; sixteenths <= 16; ++sixteenths) {
    SCOPED_TRACE(sixteenths);
    const int64_t before = live();
    const Bytes budget(before + kState.count() * sixteenths / 16);
    Bytes smallest = budget;
    try {
      PlannedTraining run(options(budget, folder), wide());
      run.step(batch);
    } catch (const BudgetExceeded& error) {
      smallest = error.smallest_feasible();
      if (smallest.count() == 0) {
        continue;  // nothing of the step has run
      }
      ++refused;
      ASSERT_GT(smallest.count(), budget.count()) << error.what();
    }
    EXPECT_LT(smallest.count() - before, kState.count() * 3 / 2) << "no state is in it";
    PlannedTraining run(options(smallest, folder), wide());
    run.step(batch);
    EXPECT_EQ(run.stepper.plan()->placement.state, Place::File);
  }
  EXPECT_GT(refused, 0);
}

TEST(StepperStateInFile, IsInPlansThatAreReadBack) {
  const TemporaryFolder folder, plans;
  const Batch batch = make_batch(16);
  const auto run = [&] {
    StepperOptions with = options(tight(), folder);
    with.budget.plan_folder = plans.path();
    PlannedTraining training(with, wide());
    training.step(batch);
    const int calls = training.calls;
    EXPECT_EQ(training.stepper.plan()->placement.state, Place::File);
    EXPECT_TRUE(is_in_file(training.optimizer));
    training.step(batch);
    return std::pair(calls, bits_of(training.state()));
  };
  const auto [first_calls, first] = run();
  const auto [second_calls, second] = run();
  EXPECT_GT(first_calls, 1);
  EXPECT_EQ(second_calls, 1) << "nothing is tried";
  EXPECT_TRUE(first == second);
}

TEST(StepperStateInFile, ARunIsResumedWithinTheSameBudget) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(16);
  const auto parts = [](PlannedTraining& run) {
    return std::map<std::string, Stateful>{
        {"model", stateful(*run.model)}, {"optimizer", stateful(run.optimizer)}, {"stepper", stateful(run.stepper)}};
  };
  std::string expected;
  {
    PlannedTraining run(options(tight(), folder), wide());
    run.step(batch);
    run.step(batch);
    SnapshotStore(folder / "snapshots").save(2, parts(run));
    run.step(batch);
    expected = bits_of(run.state());
  }
  const Bytes budget = tight();
  PlannedTraining resumed(options(budget, folder), wide());
  {
    const MemoryLimit limit(torch::kCPU, budget);  // while it is loaded, too
    ASSERT_EQ(SnapshotStore(folder / "snapshots").load_latest(parts(resumed)), 2);
  }
  resumed.step(batch);
  EXPECT_TRUE(bits_of(resumed.state()) == expected);
}

// --- the choice

// A step of 64 items that keeps ten results of 64 KiB, beside a MiB of state.
class LayersAndState final : public detail::TrialRunner {
 public:
  LayersAndState() { journal_.begin(); }
  detail::StepToPlan step() {
    return {.trial = *this,
            .counts = {.batch = 64,
                       .fixed_bytes = kMiB,
                       .gradient_bytes = static_cast<int64_t>(weight_.nbytes()),
                       .state_in_file = {.moved = kMiB, .workspace = 1024}},
            .micro_batch = 64};
  }
  void load(int64_t items, bool) override { items_ = items; }
  void unload() override {}
  Tensor loss() override {
    Tensor hidden = torch::ones({items_, 1}) * weight_;
    for (int i = 0; i < 10; ++i) {
      hidden = hidden.mm(matrix_).sigmoid();
    }
    return hidden.sum();
  }
  void hold_gradients(bool) override {}
  int64_t idle_state_bytes() const override { return 0; }
  std::string pinned_by() const override { return ""; }
  int64_t fixed_bytes() const override { return kMiB; }
  detail::EffectJournal& journal() override { return journal_; }
  std::string described() const override { return ""; }
  int64_t put(Placement placement, int64_t) override {
    places.push_back(placement.state);
    return 0;
  }

  std::vector<Place> places;

 private:
  detail::EffectJournal journal_;
  Tensor matrix_ = torch::full({256, 256}, 0.01);
  Tensor weight_ = torch::full({256}, 0.5, torch::requires_grad());
  int64_t items_ = 0;
};

// Over a link so slow that whatever moves takes hours.
TEST(StepperStateInFile, GoesThereOnlyWhereThatIsFasterOrNothingElseFits) {
  LayersAndState layers;
  const int64_t plain = detail::StepPlanner(Bytes(1 << 30), false).plan(layers.step())->choice.peak_bytes;
  const OffloadLink slow{.out_bytes_per_second = 100, .back_bytes_per_second = 100};
  for (const bool only_so : {false, true}) {
    layers.places.clear();
    detail::StepPlanner planner(Bytes(only_so ? plain - kMiB + (64 << 10) : plain - (256 << 10)), false, slow);
    const StepPlan plan = *planner.plan(layers.step());
    EXPECT_EQ(plan.placement.state == Place::File, only_so) << plan.explain();
    EXPECT_EQ(layers.places, (std::vector<Place>{Place::File, only_so ? Place::File : Place::Memory}))
        << "there while it is tried";
    EXPECT_EQ(plan.activations.has_value(), !only_so) << plan.explain();
    EXPECT_EQ(plan.choice.seconds > 3600, only_so);
    EXPECT_EQ(StepPlan::from_json(plan.to_json()).placement.state == Place::File, only_so);
  }
}

}  // namespace
}  // namespace snug::stepper_state_in_file_test
