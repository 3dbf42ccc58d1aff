// Plans of large micro-batches that are predicted from small ones: how little runs for them, and models whose small
// micro-batches tell nothing, or the wrong thing, about large ones.

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/stepper.h"
#include "tests/step/planned_training.h"
#include "tests/support/tensors.h"

namespace snug::predicted_plan_test {
namespace {

using testing::same_bits;
using torch::Tensor;
using namespace testing::planned;

constexpr int64_t kItems = 512, kSmall = 32, kLarge = 64;  // the batch, and the micro-batches that tell of it

using LossOf = std::function<Loss(nn::Sequential&, const Batch&)>;

Loss squared(nn::Sequential& model, const Batch& micro) {
  return Loss::sum((model->forward(micro[0]) - micro[1]).square().sum(), micro[1].numel());
}

// The number of times that forward took so many items.
using Calls = std::map<int64_t, int>;

struct Planned {
  Calls calls;
  StepPlan plan;
};

// Plans in `share` of plain training's bytes, and makes two steps. Their bits are those of the same micro-batches
// without a plan.
Planned planned_within(
    double share, const LossOf& loss_of, const std::function<nn::Sequential()>& make = [] { return deep(); }) {
  const Batch batch = make_batch(kItems);
  const auto step = [&](PlannedTraining& run) {
    return run.stepper.step(batch, [&](const Batch& micro) { return loss_of(run.model, micro); });
  };
  int64_t plain = 0;
  {
    const int64_t before = live();
    PlannedTraining run({}, make());
    step(run);
    plain = step(run).peak_bytes - before;
  }
  Planned planned;
  std::vector<Tensor> state;
  {
    const int64_t budget = live() + static_cast<int64_t>(share * static_cast<double>(plain));
    PlannedTraining run({.budget = {.memory = Bytes(budget)}}, make());
    planned.plan = *run.stepper.plan_for(batch, [&](const Batch& micro) {
      ++planned.calls[micro[0].size(0)];
      return loss_of(run.model, micro);
    });
    for (int i = 0; i < 2; ++i) {
      const StepResult result = step(run);
      EXPECT_LE(result.peak_bytes, budget);
      EXPECT_EQ(result.step_downs, 0);
      EXPECT_EQ(result.plan_deviation, "");
      EXPECT_EQ(result.micro_batches, planned.plan.choice.micro_batches) << run.stepper.plan()->considered;
    }
    state = run.state();
  }
  PlannedTraining reference({.micro_batch = planned.plan.choice.items}, make());
  for (int i = 0; i < 2; ++i) {
    step(reference);
  }
  EXPECT_TRUE(same_bits(state, reference.state()));
  return planned;
}

// The whole batch is tried once without a plan first.
void expect_few_calls(const Planned& planned) {
  for (const auto& [items, times] : planned.calls) {
    if (items != kSmall && items != kLarge) {
      EXPECT_LE(times, items == kItems ? 2 : 1) << items;
    }
  }
}

TEST(PredictedPlan, IsNotMadeForABatchThatFits) {
  const Planned planned = planned_within(1.5, squared);
  EXPECT_EQ(planned.plan.choice.items, kItems);
  EXPECT_FALSE(planned.plan.activations);
  EXPECT_EQ(planned.calls, (Calls{{kItems, 2}}));
}

TEST(PredictedPlan, IsProvenByTheOnlyRunUnderIt) {
  for (const double share : {0.9, 0.7, 0.5, 0.4}) {
    SCOPED_TRACE(share);
    expect_few_calls(planned_within(share, squared));
  }
}

TEST(PredictedPlan, IsMadeForABatchThatMustNotBeCut) {
  const Planned planned = planned_within(0.7, squared, with_batch_norm);
  EXPECT_EQ(planned.plan.choice.items, kItems);
  EXPECT_TRUE(planned.plan.activations);
  expect_few_calls(planned);
  const Planned whole = planned_within(0.7, [](nn::Sequential& model, const Batch& micro) {
    return Loss::whole((model->forward(micro[0]) - micro[1]).square().mean());
  });
  EXPECT_EQ(whole.plan.choice.items, kItems);
  EXPECT_TRUE(whole.plan.activations);
  expect_few_calls(whole);
}

// Plans a step in `share` of plain training's bytes, and counts.
Calls calls_within(double share, const Batch& batch, const std::function<nn::Sequential()>& make, bool fits) {
  int64_t plain = 0;
  {
    const int64_t before = live();
    PlannedTraining run({}, make());
    run.step(batch);
    plain = run.step(batch).peak_bytes - before;
  }
  const int64_t budget = live() + static_cast<int64_t>(share * static_cast<double>(plain));
  PlannedTraining run({.budget = {.memory = Bytes(budget)}}, make());
  Calls calls;
  const auto plan = [&] {
    run.stepper.plan_for(batch, [&](const Batch& micro) {
      ++calls[micro[0].size(0)];
      return squared(run.model, micro);
    });
  };
  if (fits) {
    plan();
  } else {
    EXPECT_THROW(plan(), BudgetExceeded);
  }
  return calls;
}

TEST(PredictedPlan, IsNotMadeForFewItemsWhosePartsRunOnceEach) {
  const Calls calls = calls_within(0.7, two_large_items(), very_deep, /*fits=*/true);
  EXPECT_GT(calls.at(2), 1);
  EXPECT_EQ(calls.at(1), 1);
}

TEST(PredictedPlan, OfABatchThatMustNotBeCutIsRefusedAfterTryingTheBatchOnce) {
  const Calls calls = calls_within(0.3, make_batch(kItems), with_batch_norm, /*fits=*/false);
  EXPECT_LE(calls.at(kItems), 9);  // two attempts at the same batch took 13
}

TEST(PredictedPlan, HasTheBytesThatTheStepTakes) {
  const Planned planned = planned_within(0.6, squared);
  const Batch batch = make_batch(kItems);
  PlannedTraining run({.budget = {.memory = Bytes(planned.plan.budget_bytes)}});
  run.step(batch);
  const int64_t peak = run.step(batch).peak_bytes, predicted = run.stepper.plan()->choice.peak_bytes;
  EXPECT_LE(peak, predicted);
  EXPECT_GE(static_cast<double>(peak), 0.95 * static_cast<double>(predicted));
}

// --- what a few items do not tell

TEST(PredictedPlan, OfAModelWithAllPairsOfItemsKeepsTheBudget) {
  const auto pairs = [](nn::Sequential& model, const Batch& micro) {
    const Tensor out = model->forward(micro[0]);
    return Loss::sum(torch::matmul(out, out.t()).sigmoid().sum() + out.square().sum(), micro[1].numel());
  };
  for (const double share : {1.5, 0.7, 0.5}) {
    SCOPED_TRACE(share);
    planned_within(share, pairs);
  }
}

TEST(PredictedPlan, OfAModelThatDoesMoreWithManyItemsKeepsTheBudget) {
  const auto branching = [](nn::Sequential& model, const Batch& micro) {
    Tensor out = model->forward(micro[0]);
    for (int64_t i = micro.size(); i > 2 * kLarge; i /= 2) {
      out = out + out.exp().sigmoid();
    }
    return Loss::sum((out - micro[1]).square().sum(), micro[1].numel());
  };
  for (const double share : {1.5, 0.7, 0.5}) {
    SCOPED_TRACE(share);
    planned_within(share, branching);
  }
}

TEST(PredictedPlan, OfHalfTheBatchIsTriedWhereTheWholeBatchTakesMoreThanPredicted) {
  const auto branching = [](nn::Sequential& model, const Batch& micro) {
    Tensor out = model->forward(micro[0]);
    for (int i = 0; micro.size() == kItems && i < 40; ++i) {
      out = out + out.exp().sigmoid();
    }
    return Loss::sum((out - micro[1]).square().sum(), micro[1].numel());
  };
  const Planned planned = planned_within(0.7, branching);
  EXPECT_EQ(planned.plan.choice.items, kItems / 2);
  EXPECT_LE(planned.calls.at(kItems), 3) << "without a plan, and twice as predicted";
}

TEST(PredictedPlan, IsNotMadeWhereSmallMicroBatchesHaveOtherOperators) {
  const auto other = [](nn::Sequential& model, const Batch& micro) {
    const Tensor out = model->forward(micro[0]);
    const Tensor difference = micro.size() <= kSmall ? (out - micro[1]).abs() : out - micro[1];
    return Loss::sum(difference.square().sum(), micro[1].numel());
  };
  const Planned planned = planned_within(0.6, other);
  EXPECT_GT(planned.calls.at(kItems), 2) << "the batch has a profile of its own";
}

TEST(PredictedPlan, OfABatchWhosePartsHaveOtherOperatorsIsTheWholeBatchIfTheBatchFits) {
  const auto loop = [](nn::Sequential& model, const Batch& micro) {
    Tensor sum = torch::zeros({});
    for (int64_t i = 0; i < micro.size(); i += kSmall) {
      sum = sum + (model->forward(micro[0].slice(0, i, i + kSmall)) - micro[1].slice(0, i, i + kSmall)).square().sum();
    }
    return Loss::sum(sum, micro[1].numel());
  };
  EXPECT_EQ(planned_within(1.5, loop).plan.choice.items, kItems);
  planned_within(0.6, loop);
}

TEST(PredictedPlan, OfAModelThatKeepsAResultCountsTheResultOnce) {
  Tensor kept;
  const auto keeping = [&](nn::Sequential& model, const Batch& micro) {
    kept = model->forward(micro[0]);
    const Tensor loss = (kept - micro[1]).square().sum();
    kept = kept.detach();
    return Loss::sum(loss, micro[1].numel());
  };
  for (const double share : {0.7, 0.5}) {
    SCOPED_TRACE(share);
    planned_within(share, keeping);
    kept = Tensor();
  }
}

TEST(PredictedPlan, DoesNotHideThatTheModelHasStateOfItsOwn) {
  const Batch batch = make_batch(kItems);
  PlannedTraining plain;
  plain.step(batch);
  const int64_t budget = live() + plain.step(batch).activation_peak_bytes / 2 + (64 << 10);
  PlannedTraining run({.budget = {.memory = Bytes(budget)}});
  double factor = 1;
  const auto counting = [&](const Batch& micro) {
    factor *= 1.5;
    return Loss::sum((run.model->forward(micro[0]) - micro[1]).square().sum() * factor, micro[1].numel());
  };
  EXPECT_THROW(run.stepper.step(batch, counting), ConfigError);
}

TEST(PredictedPlan, IsNotMadeWhereSmallMicroBatchesDoNotRun) {
  const auto picky = [](nn::Sequential& model, const Batch& micro) {
    TORCH_CHECK(micro.size() > kLarge, "needs more items");
    return squared(model, micro);
  };
  const Planned planned = planned_within(0.6, picky);
  EXPECT_GT(planned.plan.choice.items, kLarge);
}

}  // namespace
}  // namespace snug::predicted_plan_test
