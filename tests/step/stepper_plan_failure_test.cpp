#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/stepper.h"
#include "src/step/step_planner.h"
#include "src/step/step_trials.h"
#include "tests/step/planned_training.h"
#include "tests/support/failing_allocations.h"

// Planning under a memory budget together with failures, and with the Stepper's other options.

namespace snug::stepper_plan_failure_test {
namespace {

using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using testing::make_mlp;
using testing::same_bits;
using torch::Tensor;
using namespace testing::planned;

// --- when it fails all the same

struct FailingCase {
  const char* name;
  int64_t micro_batch;
  int64_t percent;  // of what plain training takes
  Precision precision = Precision::Float32;
  bool has_buffers = false;  // which also pin the batch
};

// And of its scaler.
std::vector<Tensor> state_of(const PlannedTraining& run) {
  std::vector<Tensor> state = run.state();
  const StateDict scaler = run.stepper.scaler().state_dict();
  if (scaler.contains("scale")) {
    state.push_back(torch::tensor(scaler.get<double>("scale"), torch::kDouble));
  }
  return state;
}

nn::Sequential normalised() {
  torch::manual_seed(3);
  return nn::Sequential(nn::Linear(kWidth, kWidth), nn::BatchNorm1d(kWidth), nn::GELU(), nn::Linear(kWidth, kWidth));
}

class StepperPlanFails : public ::testing::TestWithParam<FailingCase> {};

TEST_P(StepperPlanFails, AndMakesTheStepAgainOrLeavesEverythingWhicheverAllocationItIs) {
  const Batch batch = make_batch(256);
  const auto make = [] { return GetParam().has_buffers ? normalised() : make_mlp({32, 64, 64, 32}, 0.1); };
  StepperOptions options{.precision = GetParam().precision, .micro_batch = GetParam().micro_batch};
  options.sixteen_bit.scaler = {.init_scale = 1024, .growth_interval = 1};  // another in every step
  const int64_t plain = plain_bytes(batch, options, make);
  const auto seed_of = [](int step) { torch::manual_seed(static_cast<uint64_t>(100 + step)); };
  PlannedTraining reference(options, make());
  std::vector<std::vector<Tensor>> after;
  for (int i = 0; i < 2; ++i) {
    seed_of(i);
    reference.step(batch);
    after.push_back(state_of(reference));
  }
  seed_of(1);
  const Tensor first_numbers = torch::rand({2});
  int64_t again = 0, dropped = 0;
  for_each_failing_allocation([&](FailingAllocation& allocation) {
    options.budget.memory = Bytes(live() + plain * GetParam().percent / 100);
    PlannedTraining run(options, make());
    seed_of(0);
    run.step(batch);
    seed_of(1);
    if (allocation.stops<BudgetExceeded>([&] { again += run.step(batch).step_downs; })) {
      ++dropped;
      ASSERT_TRUE(same_bits(state_of(run), after[0]));
      ASSERT_TRUE(same_bits(torch::rand({2}), first_numbers)) << "generators";
      seed_of(1);
      run.step(batch);
    }
    ASSERT_TRUE(same_bits(state_of(run), after[1]));
  });
  EXPECT_GT(again, 10);
  EXPECT_EQ(dropped, 0) << "nothing is allocated outside of what is made again";
}

INSTANTIATE_TEST_SUITE_P(WholeOrInPartsPlannedOrPlain, StepperPlanFails,
                         ::testing::Values(FailingCase{"Whole", 256, 80}, FailingCase{"InParts", 64, 200},
                                           FailingCase{"BatchNormInFloat16", 256, 92, Precision::Float16, true}),
                         [](const auto& of) { return of.param.name; });

// Such as cuBLAS's, of its own memory.
// The plan that is tried leaves more free where it runs out of memory. Whatever else fails of planning ends in an
// error.
TEST(StepperPlan, LeavesMoreFreeWhereItsTrialRunsOutOfMemory) {
  const Batch batch = make_batch(256);
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  PlannedTraining reference({.micro_batch = 256});
  reference.step(batch);
  int64_t left_free = 0;
  for_each_failing_allocation({.is_thinned = true}, [&](FailingAllocation& allocation) {
    PlannedTraining run({.micro_batch = 256, .budget = {.memory = Bytes(live() + plain * 8 / 10)}});
    if (allocation.stops<BudgetExceeded>([&] { run.step(batch); })) {
      run.step(batch);
    }
    ASSERT_TRUE(same_bits(run.state(), reference.state()));
    left_free += run.stepper.plan()->considered.find("ran out of memory when its plan was tried") != std::string::npos;
  });
  EXPECT_GT(left_free, 0);
}

TEST(StepperPlan, TakesLessWhereAnAllocationOfALibraryFails) {
  const Batch batch = make_batch(256);
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  PlannedTraining run({.micro_batch = 256, .budget = {.memory = Bytes(live() + plain * 8 / 10)}});
  PlannedTraining reference({.micro_batch = 256});
  const auto step_failing_at = [&](int call) {
    int calls = 0;
    reference.step(batch);
    return run.stepper
        .step(batch,
              [&](const Batch& micro) {
                TORCH_CHECK(++calls != call,
                            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)");
                return run.loss_of(micro);
              })
        .step_downs;
  };
  EXPECT_EQ(step_failing_at(1), 0) << "while the step is profiled";
  EXPECT_EQ(step_failing_at(1), 1);
  EXPECT_EQ(step_failing_at(0), 0);
  EXPECT_TRUE(same_bits(run.state(), reference.state()));
}

// --- what a planner remembers of it

// A step of 64 items, each of which multiplies what `layer` makes of it.
class LayersToPlan final : public detail::TrialRunner {
 public:
  LayersToPlan(Tensor weight, std::function<Tensor(const Tensor&)> layer)
      : weight_(std::move(weight)), layer_(std::move(layer)) {
    journal_.begin();
  }

  detail::StepToPlan step() {
    return {.trial = *this, .counts = {.batch = 64, .gradient_bytes = static_cast<int64_t>(weight_.nbytes())}};
  }
  void load(int64_t items, bool) override { items_ = items; }
  void unload() override {}
  Tensor loss() override {
    Tensor hidden = torch::ones({items_, 1}) * weight_;
    for (int i = 0; i < 10; ++i) {
      hidden = layer_(hidden);
    }
    return hidden.sum();
  }
  void hold_gradients(bool) override {}
  int64_t idle_state_bytes() const override { return 0; }
  std::string pinned_by() const override { return ""; }
  int64_t fixed_bytes() const override { return 0; }
  detail::EffectJournal& journal() override { return journal_; }
  std::string described() const override { return ""; }

 private:
  detail::EffectJournal journal_;
  Tensor weight_;
  std::function<Tensor(const Tensor&)> layer_;
  int64_t items_ = 0;
};

TEST(StepPlanner, HasTheFirstPlanAgainAfterAStepWasGivenUp) {
  const Tensor weight = torch::full({256}, 0.5, torch::requires_grad());
  LayersToPlan layers(weight, [](const Tensor& x) {
    return x.mm(torch::full({256, 256}, 0.01)).sigmoid();  // takes time, so no more of it is made again than must be
  });
  detail::StepToPlan step = layers.step();
  step.micro_batch = step.counts.batch;  // else measured times choose it
  const int64_t plain = detail::StepPlanner(Bytes(1 << 30), false).plan(step)->choice.peak_bytes;
  // Without a byte to spare, so that less has to do.
  const int64_t tight = detail::StepPlanner(Bytes(plain * 9 / 10), false).plan(step)->choice.peak_bytes;
  detail::StepPlanner planner(Bytes(tight), false);
  const StepChoice first = planner.plan(step)->choice;
  const std::string choices = planner.choices();
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(planner.step_down(detail::PlanEvent::NoRoom));
    planner.plan(step);
  }
  const StepChoice last = planner.plan(step)->choice;
  EXPECT_LT(last.peak_bytes, first.peak_bytes);
  planner.give_up();
  EXPECT_EQ(planner.plan(step)->choice, first);
  EXPECT_EQ(planner.choices(), choices);
  planner.step_down(detail::PlanEvent::NoRoom);
  const StepChoice made = planner.plan(step)->choice;
  planner.settle(detail::PlanEvent::Made);
  planner.give_up();  // another step
  EXPECT_EQ(planner.plan(step)->choice, made);
}

// The whole batch does not run, so its needs are those of its parts.
TEST(StepTrials, NameABudgetWithTheBytesThatAreLeftFreeWhereOnlyPartsOfTheBatchRun) {
  const Tensor weight = torch::full({256}, 0.5, torch::requires_grad());
  LayersToPlan layers(weight, [](const Tensor& x) {
    TORCH_CHECK(x.size(0) < 64, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)");
    return x.sigmoid();
  });
  detail::StepToPlan step = layers.step();
  step.micro_batch = step.counts.batch;
  const detail::PlanLimits limits{.budget = 64 << 10};
  const auto named = [&](detail::StepTrials& trials) {
    trials.run(step, nullptr);
    try {
      trials.choose(step, nullptr, 0);
    } catch (const BudgetExceeded& error) {
      return error.smallest_feasible().count();
    }
    ADD_FAILURE() << "a plan";
    return int64_t{0};
  };
  detail::StepTrials trials(step, limits, Place::Memory), with_room(step, limits, Place::Memory);
  ASSERT_TRUE(with_room.leave_more_free());
  const int64_t left_free = with_room.counts().left_free, least = named(trials);
  ASSERT_GT(left_free, 0);
  EXPECT_GT(least, limits.budget);
  EXPECT_EQ(named(with_room), least + left_free);
}

TEST(StepPlanner, GoesOnToLessThanOtherRanksTakeWhereThatCannotBeComputedAgain) {
  const Tensor weight = torch::full({256}, 0.5, torch::requires_grad());
  int masks = 0;
  LayersToPlan layers(weight, [&masks](const Tensor& x) {
    const Tensor mask = torch::empty(x.sizes());
    std::fill_n(mask.data_ptr<float>(), mask.numel(), static_cast<float>(1 + masks++ % 10));  // which no operator sees
    return x * mask;
  });
  detail::StepToPlan step = layers.step();
  step.counts.at_most = 64;
  const int64_t plain = detail::StepPlanner(Bytes(1 << 30), false).plan(step)->choice.peak_bytes;
  detail::StepPlanner planner(Bytes(plain * 3 / 4), false);
  EXPECT_EQ(planner.plan(step)->choice.items, 32);
}

TEST(StepperPlan, ForgetsTheStepsMadeAgainWithAWindowThatIsDropped) {
  const Batch batch = make_batch(128);
  PlannedTraining run(
      {.budget = {.memory = Bytes(live() + (1 << 26))}, .accumulate = {.every = 2, .tail = Tail::Drop}});
  const auto accumulate = [&] {
    return run.stepper.accumulate(batch, [&](const Batch& micro) { return run.loss_of(micro); });
  };
  accumulate();
  accumulate();
  bool is_made_again = false;
  for (int64_t k = 1; !is_made_again; ++k) {
    ASSERT_LT(k, 100);
    FailingAllocation allocation(k);
    const bool is_before_it_begins = allocation.stops<BudgetExceeded>(accumulate);
    is_made_again = !is_before_it_begins && allocation.has_failed();
  }
  run.stepper.flush();
  accumulate();
  EXPECT_EQ(accumulate()->step_downs, 0);
}

// --- together with other options

TEST(StepperPlan, GoesWithOtherOptionsToTheSameBits) {
  const Batch batch = make_batch(512);
  const std::vector<std::pair<const char*, StepperOptions>> cases = {
      {"bfloat16", {.precision = Precision::BFloat16, .micro_batch = 512}},
      {"low weights", {.precision = Precision::BFloat16, .weights = Weights::Low, .micro_batch = 256}},
      {"clipping and noise", {.micro_batch = 256, .clip_norm = 0.1, .gradient_noise = true}},
  };
  for (auto [name, options] : cases) {
    const auto make = [&] {
      auto model = deep();
      if (options.weights == Weights::Low) {
        model->to(torch::kBFloat16);
      }
      return model;
    };
    const auto train = [&](PlannedTraining& run) {
      std::vector<double> seen;
      for (int i = 0; i < 2; ++i) {
        run.stepper.sample_gradients();
        const StepResult result = run.stepper.step(batch, [&](const Batch& micro) {
          const Tensor input = options.weights == Weights::Low ? micro[0].to(torch::kBFloat16) : micro[0];
          return Loss::sum((run.model->forward(input).to(torch::kFloat) - micro[1]).pow(2).sum(), micro[1].numel());
        });
        seen.insert(seen.end(),
                    {result.loss(), result.grad_norm(), static_cast<double>(result.gradient_statistics.size())});
        EXPECT_TRUE(!options.gradient_noise || result.first_grad_norm() > 0) << name;
      }
      return seen;
    };
    const int64_t before = live();
    int64_t peak = 0;
    std::vector<double> expected;
    std::vector<Tensor> expected_state;
    {
      PlannedTraining plain(options, make());
      expected = train(plain);
      peak = plain.stepper
                 .step(batch,
                       [&](const Batch& micro) {
                         const Tensor input =
                             options.weights == Weights::Low ? micro[0].to(torch::kBFloat16) : micro[0];
                         return Loss::sum((plain.model->forward(input).to(torch::kFloat) - micro[1]).pow(2).sum(),
                                          micro[1].numel());
                       })
                 .peak_bytes -
             before;
    }
    options.budget.memory = Bytes(live() + peak * 8 / 10);
    PlannedTraining run(options, make());
    EXPECT_EQ(train(run), expected) << name;
    ASSERT_TRUE(run.stepper.plan()) << name;
    EXPECT_TRUE(run.stepper.plan()->activations) << name;
  }
}

// A batch whose parts are copies, as those that go to another device are.
struct Copied {
  Tensor x, y;

  int64_t size() const { return x.size(0); }
  Copied slice(int64_t begin, int64_t end) const {
    return {x.slice(0, begin, end).clone(), y.slice(0, begin, end).clone()};
  }
};

TEST(StepperPlan, CountsTheCopiesThatMicroBatchesAre) {
  const Batch batch = make_batch(512);
  const Copied copied{batch[0], batch[1]};
  const int64_t plain = plain_bytes(batch, {.micro_batch = 128}, [] { return deep(); });
  const Bytes budget(live() + plain * 9 / 10);
  PlannedTraining run({.micro_batch = 128, .budget = {.memory = budget}});
  const auto loss_of = [&](const Copied& micro) {
    return Loss::sum((run.model->forward(micro.x) - micro.y).pow(2).sum(), micro.y.numel());
  };
  for (int i = 0; i < 2; ++i) {
    const StepResult result = run.stepper.step(copied, loss_of);
    EXPECT_LE(result.peak_bytes, run.stepper.plan()->choice.peak_bytes);
    EXPECT_EQ(result.step_downs, 0);
  }
  PlannedTraining reference({.micro_batch = 128});
  reference.step(batch);
  reference.step(batch);
  EXPECT_TRUE(same_bits(run.state(), reference.state()));
}

}  // namespace
}  // namespace snug::stepper_plan_failure_test
