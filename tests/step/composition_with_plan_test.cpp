// composition_test.cpp with BatchNorm, and with activations kept as a plan for a memory budget has it: precision x what
// is kept for backward x split x dropout and BatchNorm. The reference is a loop written by hand over the same parts
// with the same seeds.

#include <optional>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "snug/autocast.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/sliced.h"
#include "snug/stepper.h"
#include "src/planner/solution.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::composition_with_plan_test {
namespace {

enum class Keep { All, Checkpoints, Automatic };
enum class Kind { Plain, Dropout, BatchNorm };
using Cell = std::tuple<Precision, Keep, int64_t, Kind>;  // and the micro-batch

constexpr int64_t kItems = 12;
constexpr int kSteps = 3;
constexpr uint64_t kSeed = 9;

class CompositionWithPlan : public ::testing::TestWithParam<Cell> {};

// Of an item, and channels of BatchNorm. So many that activations take more than all else.
int64_t rows_of(Kind kind) { return kind == Kind::BatchNorm ? 64 : 256; }

torch::nn::Sequential make_model(Kind kind) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (const int64_t width : {6, 16, 16}) {
    model->push_back(torch::nn::Linear(width, 16));
    if (kind == Kind::BatchNorm) {
      model->push_back(torch::nn::BatchNorm1d(rows_of(kind)));
    }
    model->push_back(torch::nn::Tanh());
    if (kind == Kind::Dropout) {
      model->push_back(torch::nn::Dropout(0.25));
    }
  }
  model->push_back(torch::nn::Linear(16, 2));
  return model;
}

Batch make_batch(Kind kind) {
  torch::manual_seed(2);
  const auto x = torch::randn({kItems, rows_of(kind), 6});
  return Batch{x, x.slice(2, 0, 2).sin()};
}

std::vector<torch::Tensor> state_of(const torch::nn::Sequential& model) {
  auto state = testing::clones_of(model->parameters());
  for (const torch::Tensor& buffer : model->buffers()) {
    state.push_back(buffer.clone());
  }
  return state;
}

std::vector<torch::Tensor> by_hand(const Cell& cell) {
  const auto [precision, keep, size, kind] = cell;
  auto model = make_model(kind);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  const Batch batch = make_batch(kind);
  torch::manual_seed(kSeed);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (const Batch& micro : micro_batches(batch, size)) {
      torch::Tensor loss;
      {
        std::optional<Autocast> autocast;
        if (precision == Precision::BFloat16) {
          autocast.emplace(torch::kCPU, torch::kBFloat16);
        }
        loss =
            testing::squared_error(model->forward(micro[0]), micro[1]).value() / static_cast<double>(batch[1].numel());
      }
      loss.backward();
    }
    optimizer.step();
  }
  return state_of(model);
}

struct Training {
  torch::nn::Sequential model;
  torch::optim::SGD optimizer;
  Stepper stepper;
  Keep keep;

  Training(const Cell& cell, Bytes budget)
      : model(make_model(std::get<Kind>(cell))),
        optimizer(model->parameters(), torch::optim::SGDOptions(0.1)),
        stepper(model, optimizer,
                {.precision = std::get<Precision>(cell),
                 .micro_batch = std::get<int64_t>(cell),
                 .budget = {.memory = budget}}),
        keep(std::get<Keep>(cell)) {}

  StepResult step(const Batch& batch) {
    return stepper.step(batch, [&](const Batch& micro) {
      const auto y = keep == Keep::Checkpoints ? checkpoint_sequential(model, 2, micro[0], LastSegment::Recompute)
                                               : model->forward(micro[0]);
      return testing::squared_error(y, micro[1]);
    });
  }
};

int64_t live() { return live_bytes(torch::kCPU).count(); }

// In the middle between the least that a step can do with and what it takes if everything is kept, above what is alive.
int64_t tight_bytes(const Cell& cell, const Batch& batch) {
  const int64_t before = live();
  const int64_t plain = Training(cell, Bytes::unlimited()).step(batch).peak_bytes - before;
  for (int64_t room = plain * 5 / 8;; room += plain / 8) {
    try {
      Training(cell, Bytes(before + room)).step(batch);
      return (plain + room) / 2;
    } catch (const BudgetExceeded&) {
    }
  }
}

TEST_P(CompositionWithPlan, EqualsTheLoopWrittenByHand) {
  const auto [precision, keep, size, kind] = GetParam();
  const auto expected = by_hand(GetParam());
  const Batch batch = make_batch(kind);
  const bool is_automatic = keep == Keep::Automatic;
  const Bytes budget = is_automatic ? Bytes(live() + tight_bytes(GetParam(), batch)) : Bytes::unlimited();
  Training run(GetParam(), budget);
  torch::manual_seed(kSeed);
  for (int step = 0; step < kSteps; ++step) {
    const StepResult result = run.step(batch);
    EXPECT_EQ(result.step_downs, 0);
    EXPECT_EQ(result.plan_deviation, "");
    EXPECT_LE(result.peak_bytes, budget.count());
  }
  if (is_automatic) {
    ASSERT_TRUE(run.stepper.plan() && run.stepper.plan()->activations);
    EXPECT_GT(run.stepper.plan()->choice.plan->seconds, run.stepper.plan()->choice.plan->plain_seconds);
  }
  const auto found = state_of(run.model);
  if (kItems % size == 0) {
    EXPECT_TRUE(testing::same_bits(found, expected));
    return;
  }
  for (size_t i = 0; i < found.size(); ++i) {  // the divisor of an uneven tail is rounded elsewhere
    EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-5, 1e-6)) << i;
  }
}

std::string name_of(const ::testing::TestParamInfo<Cell>& info) {
  const auto [precision, keep, size, kind] = info.param;
  return std::string(to_string(precision)) +
         (keep == Keep::All           ? "_all"
          : keep == Keep::Checkpoints ? "_checkpoints"
                                      : "_automatic") +
         "_of_" + std::to_string(size) +
         (kind == Kind::Plain     ? ""
          : kind == Kind::Dropout ? "_dropout"
                                  : "_batch_norm");
}

INSTANTIATE_TEST_SUITE_P(Table, CompositionWithPlan,
                         ::testing::Combine(::testing::Values(Precision::Float32, Precision::BFloat16),
                                            ::testing::Values(Keep::Automatic), ::testing::Values<int64_t>(12, 4, 5),
                                            ::testing::Values(Kind::Plain, Kind::Dropout, Kind::BatchNorm)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(WithBatchNorm, CompositionWithPlan,
                         ::testing::Combine(::testing::Values(Precision::Float32, Precision::BFloat16),
                                            ::testing::Values(Keep::All, Keep::Checkpoints),
                                            ::testing::Values<int64_t>(12, 4, 5), ::testing::Values(Kind::BatchNorm)),
                         name_of);

}  // namespace
}  // namespace snug::composition_with_plan_test
