#include <list>
#include <memory>
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
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "src/core/optimizer_capabilities.h"
#include "src/planner/solution.h"
#include "tests/step/planned_training.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"
#include "tests/support/times_mask.h"

// A Stepper with a memory budget: it keeps it, and the steps are those of plain training to the bit.

namespace snug::stepper_plan_test {
namespace {

using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::same_bits;
using torch::Tensor;
using namespace testing::planned;

// --- the promise

TEST(StepperPlan, KeepsTheBudgetAndTheBitsOfPlainTraining) {
  const Batch batch = make_batch(512);
  for (const double dropout : {0.0, 0.2}) {
    const auto make = [&] { return deep(dropout); };
    const int64_t plain = plain_bytes(batch, {}, make);
    for (const double share : {0.9, 0.6, 0.5}) {
      PlannedTraining reference({}, make());
      torch::manual_seed(11);
      for (int i = 0; i < 3; ++i) {
        reference.step(batch);
      }
      const auto expected = reference.state();
      const auto next = torch::rand({3});
      const int64_t budget = live() + static_cast<int64_t>(share * static_cast<double>(plain));
      PlannedTraining run({.micro_batch = 512, .budget = {.memory = Bytes(budget)}}, make());
      torch::manual_seed(11);
      for (int i = 0; i < 3; ++i) {
        const StepResult result = run.step(batch);
        EXPECT_LE(result.peak_bytes, budget) << share;
        EXPECT_EQ(result.step_downs, 0);
        EXPECT_EQ(result.plan_deviation, "");
        const auto plan = run.stepper.plan();
        ASSERT_TRUE(plan);
        EXPECT_LE(plan->choice.peak_bytes, budget);
        EXPECT_LE(result.peak_bytes, plan->choice.peak_bytes) << share << " in step " << i;
        EXPECT_TRUE(plan->activations) << "less than plain training takes";
      }
      EXPECT_TRUE(same_bits(torch::rand({3}), next));
      EXPECT_TRUE(same_bits(run.state(), expected)) << share << " dropout " << dropout;
    }
  }
}

TEST(StepperPlan, TrainsOnItemsOfWhichEachAloneTakesFourTimesTheBudget) {
  const Batch batch = two_large_items();
  PlannedTraining reference({.micro_batch = 1}, very_deep());
  reference.step(batch);
  const int64_t plain = reference.step(batch).activation_peak_bytes;
  const auto expected = reference.state();
  const int64_t budget = live() + plain / 4;
  PlannedTraining run({.budget = {.memory = Bytes(budget)}}, very_deep());
  for (int i = 0; i < 2; ++i) {
    const StepResult result = run.step(batch);
    EXPECT_EQ(result.micro_batches, 2);
    EXPECT_EQ(result.step_downs, 0);
    EXPECT_LE(result.peak_bytes, budget);
  }
  EXPECT_TRUE(same_bits(run.state(), expected));
}

TEST(StepperPlan, MeasuresGradientNoiseWhereItSplitsTheBatch) {
  const Batch batch = make_batch(512);
  const int64_t smallest = smallest_bytes(batch, {}, [] { return deep(); });
  PlannedTraining run({.budget = {.memory = Bytes(live() + smallest)}, .gradient_noise = true}, deep());
  const StepResult result = run.step(batch);
  ASSERT_GT(result.micro_batches, 1);
  PlannedTraining by_hand({.micro_batch = run.stepper.plan()->choice.items, .gradient_noise = true}, deep());
  EXPECT_EQ(result.first_grad_norm(), by_hand.step(batch).first_grad_norm());
  EXPECT_GT(result.first_grad_norm(), 0);
  EXPECT_THAT(error_of<ConfigError>([] { PlannedTraining({.gradient_noise = true}); }), HasSubstr("nothing splits"));
}

TEST(StepperPlan, ThatNeedsNothingLeavesTheStepPlain) {
  const Batch batch = make_batch(64);
  PlannedTraining run({.micro_batch = 64, .budget = {.memory = Bytes::parse("1GiB")}});
  const StepResult result = run.step(batch);
  ASSERT_TRUE(run.stepper.plan());
  EXPECT_FALSE(run.stepper.plan()->activations);
  PlannedTraining reference;
  EXPECT_EQ(reference.step(batch).loss(), result.loss());
  EXPECT_TRUE(same_bits(run.state(), reference.state()));
  EXPECT_FALSE(reference.stepper.plan()) << "without a budget there is no plan";
}

TEST(StepperPlan, ChoosesAMicroBatchAndMakesTheStepsOfThatMicroBatch) {
  const Batch batch = make_batch(512);
  const int64_t smallest = smallest_bytes(batch, {}, [] { return deep(); });
  PlannedTraining run({.budget = {.memory = Bytes(live() + smallest + smallest / 4)}});
  StepResult result = run.step(batch);
  const int64_t items = run.stepper.plan()->choice.items;
  EXPECT_LT(items, 512);
  EXPECT_EQ(result.micro_batches, (512 + items - 1) / items);
  result = run.step(batch);
  PlannedTraining reference({.micro_batch = items});
  reference.step(batch);
  EXPECT_EQ(reference.step(batch).loss(), result.loss());
  EXPECT_TRUE(same_bits(run.state(), reference.state()));
  EXPECT_THAT(run.stepper.plan()->explain(), HasSubstr("<- chosen"));
}

TEST(StepperPlan, ThatCannotBeNamesABudgetThatWouldDo) {
  const Batch batch = make_batch(512);
  const auto with_budget = [&](int64_t budget) {
    PlannedTraining run({.micro_batch = 512, .budget = {.memory = Bytes(budget)}});
    const auto before = run.state();
    std::optional<Bytes> smallest;
    try {
      EXPECT_LE(run.step(batch).peak_bytes, budget);
      EXPECT_LE(run.step(batch).peak_bytes, budget);
    } catch (const BudgetExceeded& error) {
      EXPECT_TRUE(same_bits(run.state(), before));
      EXPECT_THAT(error.what(), HasSubstr(Bytes(budget).str()));
      smallest = error.smallest_feasible();
    }
    return smallest;
  };
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  std::optional<Bytes> smallest;
  for (int64_t share = 90; share > 0; share -= 5) {
    smallest = with_budget(live() + plain * share / 100);
    if (smallest) {
      break;
    }
  }
  ASSERT_TRUE(smallest) << "half of nothing should not do";
  EXPECT_GT(smallest->count(), live());
  EXPECT_FALSE(with_budget(smallest->count())) << "it said so itself";
}

// The peak is where the first pooling goes backward: it needs its input and the gradient of that, whatever a plan does.
// So a plan saves little, and its profile may need more than the step takes without.
TEST(StepperPlan, ThatCannotBeNamesNoMoreThanAPlainStepTakes) {
  const auto make = [] {
    torch::manual_seed(3);
    return nn::Sequential(nn::Conv2d(1, 10, 5), nn::MaxPool2d(2), nn::ReLU(), nn::Conv2d(10, 20, 5), nn::MaxPool2d(2),
                          nn::ReLU(), nn::Flatten(), nn::Linear(320, 10));
  };
  for (const int64_t items : {32, 64, 128}) {
    torch::manual_seed(7);
    const Batch batch{torch::randn({items, 1, 28, 28}), torch::randn({items, 10})};
    const int64_t plain = plain_bytes(batch, {}, make);
    for (const int64_t share : {30, 70}) {
      const int64_t before = live();
      Bytes smallest(0);
      try {
        PlannedTraining run({.micro_batch = items, .budget = {.memory = Bytes(before + plain * share / 100)}}, make());
        run.step(batch);
        ADD_FAILURE() << "that should not do";
      } catch (const BudgetExceeded& error) {
        smallest = error.smallest_feasible();
      }
      constexpr int64_t kSmallThings = 32 << 10;
      EXPECT_LE(smallest.count(), before + plain + kSmallThings) << items << " items, plain: " << plain;
      PlannedTraining again({.micro_batch = items, .budget = {.memory = smallest}}, make());
      EXPECT_LE(again.step(batch).peak_bytes, smallest.count());
    }
  }
}

// Most of what backward needs cannot be computed again.
nn::Sequential with_masks() {
  torch::manual_seed(3);
  nn::Sequential model(nn::Linear(kWidth, kWidth));
  for (int i = 0; i < 10; ++i) {
    model->push_back(nn::Functional([](const Tensor& x) { return testing::TimesMask::apply(x); }));
  }
  model->push_back(nn::Linear(kWidth, kWidth));
  return model;
}

TEST(StepperPlan, MayOffloadWhereThatIsAllowedAndHasTheBitsOfPlainTraining) {
  const testing::TemporaryFolder folder;
  const Batch batch = make_batch(512);
  const int64_t plain = plain_bytes(batch, {}, with_masks);
  PlannedTraining reference({}, with_masks());
  reference.step(batch);
  reference.step(batch);
  const int64_t budget = live() + plain * 6 / 10;
  PlannedTraining run({.micro_batch = 512, .budget = {.memory = Bytes(budget), .offload = folder.path()}},
                      with_masks());
  EXPECT_LE(run.step(batch).peak_bytes, budget);
  EXPECT_LE(run.step(batch).peak_bytes, budget);
  EXPECT_TRUE(same_bits(run.state(), reference.state()));
  ASSERT_TRUE(run.stepper.plan() && run.stepper.plan()->activations);
  EXPECT_GT(run.stepper.plan()->activations->offloaded().bytes_back, 0);
  PlannedTraining not_allowed({.micro_batch = 512, .budget = {.memory = Bytes(budget)}}, with_masks());
  EXPECT_THROW(not_allowed.step(batch), BudgetExceeded);
  EXPECT_THAT(error_of<ConfigError>([&] { PlannedTraining({.budget = {.offload = folder.path()}}); }),
              HasSubstr("memory budget"));
}

TEST(StepperPlan, TurnedOffLeavesALimit) {
  const Batch batch = make_batch(512);
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  PlannedTraining run({.budget = {.memory = Bytes(live() + plain * 6 / 10), .plan = false}});
  EXPECT_THROW(run.step(batch), BudgetExceeded);
  EXPECT_EQ(run.calls, 1);
}

// --- what must not be cut

TEST(StepperPlan, DoesNotCutABatchThatIsNormalisedByItsStatisticsUnlessAllowed) {
  const Batch batch = make_batch(512);
  const int64_t plain = plain_bytes(batch, {}, with_batch_norm);
  PlannedTraining reference({}, with_batch_norm());
  reference.step(batch);
  reference.step(batch);
  const auto expected = reference.state();
  PlannedTraining run({.budget = {.memory = Bytes(live() + plain * 6 / 10)}}, with_batch_norm());
  run.step(batch);
  run.step(batch);
  EXPECT_EQ(run.stepper.plan()->choice.items, 512);
  EXPECT_THAT(run.stepper.plan()->explain(), HasSubstr("batch_norm"));
  EXPECT_TRUE(same_bits(run.state(), expected)) << "running statistics included";

  const int64_t smallest = smallest_bytes(batch, {.budget = {.split_batch_norm = true}}, with_batch_norm);
  const int64_t little = smallest + smallest / 4;
  EXPECT_GT(smallest_bytes(batch, {}, with_batch_norm), little);
  PlannedTraining cut({.budget = {.memory = Bytes(live() + little), .split_batch_norm = true}}, with_batch_norm());
  cut.step(batch);
  EXPECT_LT(cut.stepper.plan()->choice.items, 512);

  PlannedTraining frozen({.budget = {.memory = Bytes(live() + little)}}, with_batch_norm());
  frozen.model->eval();
  frozen.step(batch);
  EXPECT_LT(frozen.stepper.plan()->choice.items, 512) << "by fixed statistics";
}

TEST(StepperPlan, DoesNotCutALossOfTheWholeBatch) {
  const Batch batch = make_batch(512);
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  PlannedTraining run({.budget = {.memory = Bytes(live() + plain * 6 / 10)}});
  const auto whole = [&](const Batch& micro) {
    return Loss::whole((run.model->forward(micro[0]) - micro[1]).pow(2).mean());
  };
  EXPECT_TRUE(run.stepper.step(batch, whole).stepped());
  EXPECT_EQ(run.stepper.plan()->choice.items, 512);
}

TEST(StepperPlan, RefusesALossOfTheWholeBatchThatIsCutByHandInOneWordWhetherItFitsOrNot) {
  const Batch batch = make_batch(512);
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  for (const int64_t room : {plain / 2, 2 * plain}) {
    PlannedTraining run({.micro_batch = 128, .budget = {.memory = Bytes(live() + room)}, .accumulate = {.every = 2}});
    const auto before = run.state();
    const auto whole = [&](const Batch& micro) {
      ++run.calls;
      return Loss::whole((run.model->forward(micro[0]) - micro[1]).pow(2).mean());
    };
    EXPECT_THAT(error_of<ConfigError>([&] { run.stepper.step(batch, whole); }), HasSubstr("use the whole batch"));
    EXPECT_EQ(run.calls, 1);
    EXPECT_THAT(error_of<ConfigError>([&] { run.stepper.accumulate(batch, whole); }), HasSubstr("use the whole batch"));
    EXPECT_TRUE(same_bits(run.state(), before));
  }
}

TEST(StepperPlan, HasRoomForTwoHalvesWithEverythingKeptInTheBytesThatTheyTakeByHand) {
  constexpr int64_t kOfPlanning = 16 << 10;  // states of generators, and the like
  const Batch batch = make_batch(512);
  const int64_t by_hand = plain_bytes(batch, {.micro_batch = 256}, [] { return deep(); });
  // Left to itself, the planner looks at halves only if a plan for the whole batch takes long, by measured times.
  PlannedTraining run({.micro_batch = 256, .budget = {.memory = Bytes(live() + by_hand + kOfPlanning)}});
  run.step(batch);
  const StepPlan plan = *run.stepper.plan();
  const size_t row = plan.considered.find("\n         256 ");
  ASSERT_NE(row, std::string::npos) << plan.considered;
  const std::string of_halves = plan.considered.substr(row + 1, plan.considered.find('\n', row + 1) - row);
  EXPECT_THAT(of_halves, Not(HasSubstr("does not fit")));
  EXPECT_TRUE(plan.choice.items != 256 || !plan.activations) << "everything can be kept";
}

// --- other batches

// Sums over a sequence, so that every length is another shape.
struct OfSequences : nn::Module {
  OfSequences() : mlp(register_module("mlp", deep())) {}
  Tensor forward(const Tensor& x) { return mlp->forward(x).sum(1); }
  nn::Sequential mlp;
};

TEST(StepperPlan, IsMadeForFewOfManyLengthsAndGoodForAll) {
  struct Sequences {
    std::shared_ptr<OfSequences> model = [] {
      torch::manual_seed(5);
      return std::make_shared<OfSequences>();
    }();
    AdamW optimizer{model->parameters(), {.lr = 0.01}};
    int calls = 0;
    StepResult step(Stepper& stepper, int64_t length) {
      torch::manual_seed(static_cast<uint64_t>(length));
      return stepper.step({torch::randn({16, length, kWidth}), torch::randn({16, kWidth})}, [&](const Batch& micro) {
        ++calls;
        return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
      });
    }
  };
  const std::vector<int64_t> lengths = {40, 38, 36, 40, 35, 20, 19, 18, 39, 17, 37};
  Sequences plain;
  Stepper without(plain.model, plain.optimizer, {});
  int64_t most = 0;
  const int64_t before = live();
  for (const int64_t length : lengths) {
    most = std::max(most, plain.step(without, length).peak_bytes);
  }
  const auto expected = clones_of(plain.model->parameters());
  Sequences run;
  const Bytes budget(live() + (most - before) * 7 / 10);
  Stepper stepper(run.model, run.optimizer, {.micro_batch = 16, .budget = {.memory = budget}});
  int plans = 0;
  for (const int64_t length : lengths) {
    const int calls = run.calls;
    const StepResult result = run.step(stepper, length);
    EXPECT_EQ(result.plan_deviation, "");
    EXPECT_LE(result.peak_bytes, budget.count());
    plans += run.calls > calls + 1 ? 1 : 0;
  }
  EXPECT_LE(plans, 3) << "40, 20 and perhaps one between";
  EXPECT_GE(plans, 2);
  EXPECT_TRUE(same_bits(clones_of(run.model->parameters()), expected));
}

TEST(StepperPlan, CoversASmallerLastBatch) {
  const std::vector<Batch> batches = {make_batch(512), make_batch(512, 8), make_batch(200, 9)};
  const int64_t plain = plain_bytes(batches[0], {}, [] { return deep(); });
  PlannedTraining reference;
  for (const Batch& batch : batches) {
    reference.step(batch);
  }
  const auto expected = reference.state();
  PlannedTraining run({.micro_batch = 512, .budget = {.memory = Bytes(live() + plain * 6 / 10)}});
  for (const Batch& batch : batches) {
    const int calls = run.calls;
    const StepResult result = run.step(batch);
    EXPECT_EQ(result.plan_deviation, "");
    EXPECT_TRUE(calls == 0 || run.calls == calls + 1) << "one plan for all";
  }
  EXPECT_TRUE(same_bits(run.state(), expected));
}

TEST(StepperPlan, NoticesOtherOperatorsAndPlansAnew) {
  const Batch batch = make_batch(512);
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  bool with_tanh = false;
  const auto train = [&](PlannedTraining& run, int i) {
    with_tanh = i >= 2;
    return run.stepper.step(batch, [&](const Batch& micro) {
      Tensor y = run.model->forward(with_tanh ? micro[0].tanh() : micro[0]);
      return Loss::sum((y - micro[1]).pow(2).sum(), micro[1].numel());
    });
  };
  PlannedTraining reference;
  for (int i = 0; i < 4; ++i) {
    train(reference, i);
  }
  const auto expected = reference.state();
  PlannedTraining run({.micro_batch = 512, .budget = {.memory = Bytes(live() + plain * 9 / 10)}});
  std::vector<std::string> deviations;
  int64_t step_downs = 0;
  for (int i = 0; i < 4; ++i) {
    const StepResult result = train(run, i);
    deviations.push_back(result.plan_deviation);
    step_downs += result.step_downs;
  }
  EXPECT_EQ(deviations[0], "");
  EXPECT_EQ(deviations[1], "");
  EXPECT_TRUE(!deviations[2].empty() || step_downs > 0) << "either it fits, or it is made again under a new plan";
  EXPECT_EQ(deviations[3], "");
  EXPECT_TRUE(same_bits(run.state(), expected));
}

TEST(StepperPlan, IsMadeAnewForOtherFrozenParameters) {
  const Batch batch = make_batch(512);
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  const auto freeze = [](PlannedTraining& run, int i) {
    const auto parameters = run.model->parameters();
    for (size_t p = 0; p + 2 < parameters.size(); ++p) {
      parameters[p].set_requires_grad(i == 2);
    }
  };
  PlannedTraining reference;  // without its Stepper
  for (int i = 0; i < 4; ++i) {
    freeze(reference, i);
    reference.optimizer.zero_grad();
    (reference.loss_of(batch).value() / static_cast<double>(batch[1].numel())).backward();
    reference.optimizer.step();
  }
  reference.optimizer.zero_grad();
  const auto expected = reference.state();
  const int64_t budget = live() + plain * 6 / 10;
  PlannedTraining run({.micro_batch = 512, .budget = {.memory = Bytes(budget)}});
  std::vector<int> calls;
  for (int i = 0; i < 4; ++i) {
    freeze(run, i);
    const StepResult result = run.step(batch);
    EXPECT_EQ(result.step_downs, 0) << "step " << i;
    EXPECT_LE(result.peak_bytes, budget) << "step " << i;
    calls.push_back(run.calls);
  }
  EXPECT_GT(calls[2], calls[1] + 1) << "planned anew";
  EXPECT_EQ(calls[3], calls[2] + 1) << "the first plan again";
  EXPECT_TRUE(same_bits(run.state(), expected));
}

TEST(StepperPlan, HoldsForAccumulatedMicroBatches) {
  const auto parts = micro_batches(make_batch(512), 256);
  const auto plain = [&] {
    const int64_t before = live();
    PlannedTraining run({.accumulate = {.every = 2}});
    int64_t peak = 0;
    for (int i = 0; i < 4; ++i) {
      const auto result =
          run.stepper.accumulate(parts[static_cast<size_t>(i % 2)], [&](const Batch& m) { return run.loss_of(m); });
      peak = result ? result->peak_bytes : peak;
    }
    return std::pair(peak - before, run.state());
  }();
  PlannedTraining run({.budget = {.memory = Bytes(live() + plain.first * 7 / 10)}, .accumulate = {.every = 2}});
  for (int i = 0; i < 4; ++i) {
    run.stepper.accumulate(parts[static_cast<size_t>(i % 2)], [&](const Batch& m) { return run.loss_of(m); });
  }
  ASSERT_TRUE(run.stepper.plan());
  EXPECT_TRUE(run.stepper.plan()->activations);
  EXPECT_TRUE(same_bits(run.state(), plain.second));

  const int calls = run.calls;
  const auto add = [&](const Batch& micro, bool with_tanh) {
    return run.stepper.accumulate(micro, [&](const Batch& m) {
      ++run.calls;
      const Tensor y = run.model->forward(with_tanh ? m[0].tanh() : m[0]);
      return Loss::sum((y - m[1]).pow(2).sum(), m[1].numel());
    });
  };
  add(parts[0], false);
  EXPECT_EQ(add(parts[1].slice(0, 100), false)->plan_deviation, "") << "a smaller one is covered";
  EXPECT_EQ(run.calls, calls + 2);
  add(parts[0].slice(0, 10), true);
  EXPECT_NE(add(parts[1], false)->plan_deviation, "") << "noticed in the first of two";
}

// --- state

TEST(StepperPlan, ChoosesTheSameMicroBatchAgainAfterARestart) {
  const Batch batch = make_batch(512);
  const StepperOptions options{.budget = {.memory = Bytes(live() + (int64_t{1} << 30))}};
  PlannedTraining run(options);
  run.step(batch);
  const int64_t chosen = run.stepper.plan()->choice.items, other = 256;
  ASSERT_EQ(chosen, 512) << "fits plainly";
  PlannedTraining resumed(options);
  resumed.stepper.load_state_dict(with_micro_batch(run.stepper.state_dict(), chosen, other));
  const auto expect_other = [&] {
    resumed.step(batch);
    EXPECT_EQ(resumed.stepper.plan()->choice.items, other);
    EXPECT_THAT(resumed.stepper.plan()->considered, Not(HasSubstr("\n         512 "))) << "nothing else is tried";
  };
  expect_other();
  const auto freeze = [&](bool frozen) {
    for (size_t p = 0; p < 4; ++p) {
      resumed.model->parameters()[p].set_requires_grad(!frozen);
    }
  };
  freeze(true);
  resumed.step(batch);
  EXPECT_THAT(resumed.stepper.plan()->considered, HasSubstr("\n         512 ")) << "nothing was chosen for this step";
  freeze(false);
  resumed.stepper.load_state_dict(resumed.stepper.state_dict());
  expect_other();
}

TEST(StepperPlan, IsPlainDataThatIsReadBack) {
  const Batch batch = make_batch(512);
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  PlannedTraining run({.micro_batch = 512, .budget = {.memory = Bytes(live() + plain * 6 / 10)}});
  run.step(batch);
  const StepPlan plan = *run.stepper.plan();
  const StepPlan read = StepPlan::from_json(plan.to_json());
  EXPECT_EQ(read.choice, plan.choice);
  EXPECT_EQ(read.budget_bytes, plan.budget_bytes);
  EXPECT_EQ(read.explain(), plan.explain());
  EXPECT_EQ(read.bytes, plan.bytes);
  EXPECT_THAT(plan.explain(), HasSubstr("optimizer's state"));
  int64_t weights = 0;
  for (const Tensor& parameter : run.model->parameters()) {
    weights += static_cast<int64_t>(parameter.nbytes());
  }
  EXPECT_EQ(plan.bytes.weights, (PlacedBytes{weights, 0}));
  EXPECT_EQ(plan.bytes.gradients, (PlacedBytes{weights, 0}));
  const auto counters = static_cast<int64_t>(run.model->parameters().size() * sizeof(float));  // of steps
  EXPECT_EQ(plan.bytes.optimizer_state, (PlacedBytes{2 * weights + counters, 0}));
  EXPECT_GT(plan.bytes.activations.in_memory, 0);
  EXPECT_LE(plan.bytes.activations.in_memory, plan.choice.plan->peak_bytes);
  const auto edited = [&](const std::string& bytes) {
    std::string json = plan.to_json();
    const size_t begin = json.find("\"bytes\":"), end = json.find("},", begin) + 2;
    return json.replace(begin, end - begin, bytes);
  };
  EXPECT_EQ(StepPlan::from_json(edited("")).bytes, BytesByKind()) << "of an earlier version";
  for (const char* pair : {"[-1,0]", "[1]", "[1,2,3]", "[0.5,0]"}) {
    const std::string kinds =
        fmt::format(R"("bytes":{{"weights":{},"gradients":[0,0],"optimizer_state":[0,0],"activations":[0,0]}},)", pair);
    EXPECT_THROW(StepPlan::from_json(edited(kinds)), ConfigError) << pair;
  }
  EXPECT_THAT(error_of<ConfigError>([] { StepPlan::from_json("{}"); }), HasSubstr("plan again"));
  EXPECT_THAT(error_of<ConfigError>([] { StepPlan::from_json(R"({"snug_step_plan": 99})"); }),
              HasSubstr("version is 99"));
}

TEST(StepperPlan, KnowsWhatStateAnOptimizerWillAllocate) {
  namespace optim = torch::optim;
  const auto check = [](const char* name, auto make) {
    auto model = deep();
    const std::unique_ptr<optim::Optimizer> optimizer = make(model->parameters());
    const int64_t expected = detail::state_bytes_to_come(*optimizer);
    for (Tensor& parameter : model->parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);
    }
    const int64_t before = live();
    optimizer->step();
    EXPECT_EQ(live() - before, expected) << name;
    EXPECT_EQ(detail::state_bytes_to_come(*optimizer), 0) << name;
  };
  using Parameters = std::vector<Tensor>;
  check("snug AdamW", [](Parameters p) { return std::make_unique<AdamW>(p); });
  check("snug AdamW8bit", [](Parameters p) { return std::make_unique<AdamW8bit>(p); });
  check("snug SGD", [](Parameters p) { return std::make_unique<SGD>(p, SGDOptions{.lr = 0.1, .momentum = 0.9}); });
  check("Adam", [](Parameters p) { return std::make_unique<optim::Adam>(p, optim::AdamOptions(0.1)); });
  check("AdamW",
        [](Parameters p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions(0.1).amsgrad(true)); });
  check("RMSprop",
        [](Parameters p) { return std::make_unique<optim::RMSprop>(p, optim::RMSpropOptions(0.1).momentum(0.5)); });
  check("SGD", [](Parameters p) { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.1).momentum(0.9)); });
  check("plain SGD", [](Parameters p) { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.1)); });
}

}  // namespace
}  // namespace snug::stepper_plan_test
