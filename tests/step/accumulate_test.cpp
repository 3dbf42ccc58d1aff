#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/stepper.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

// Stepper::accumulate() over two epochs of seven micro-batches, three to a step, against loops written by hand.

namespace snug::accumulate_test {
namespace {

using testing::clones_of;
using testing::close_in_norm;
using testing::make_mlp;
using testing::same_bits;
using torch::Tensor;

constexpr int64_t kAccumulate = 3;

/// 27 items: six micro-batches of 4, and one of 3.
std::vector<Batch> epoch() {
  torch::manual_seed(7);
  const Tensor x = torch::randn({27, 6});
  return micro_batches({x, x.slice(1, 0, 2).sin()}, 4);
}

Tensor sum_of_squares(torch::nn::Sequential& model, const Batch& batch) {
  return (model->forward(batch[0]) - batch[1]).pow(2).sum();
}

/// One step of SGD for each group of micro-batches, on the mean over all items of the group.
std::vector<Tensor> by_hand(const std::vector<std::vector<Batch>>& groups) {
  auto model = make_mlp({6, 16, 2});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  for (const auto& group : groups) {
    optimizer.zero_grad();
    int64_t items = 0;
    for (const Batch& micro : group) {
      items += micro[1].numel();
    }
    for (const Batch& micro : group) {
      (sum_of_squares(model, micro) / static_cast<double>(items)).backward();
    }
    optimizer.step();
  }
  return clones_of(model->parameters());
}

struct Outcome {
  std::vector<Tensor> parameters;
  std::vector<int64_t> micro_batches, items;  // of each step
};

Outcome by_stepper(Tail tail, bool of_means) {
  auto model = make_mlp({6, 16, 2});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  Stepper stepper(model, optimizer, {.accumulate = {.every = kAccumulate, .tail = tail}});
  Outcome outcome;
  const auto note = [&](const std::optional<StepResult>& result) {
    if (result) {
      EXPECT_TRUE(result->stepped());
      outcome.micro_batches.push_back(result->micro_batches);
      outcome.items.push_back(result->items);
    }
  };
  for (int i = 0; i < 2; ++i) {
    for (const Batch& micro : epoch()) {
      note(stepper.accumulate(micro, [&](const Batch& m) {
        const int64_t items = m[1].numel();
        const Tensor sum = sum_of_squares(model, m);
        return of_means ? Loss::mean(sum / static_cast<double>(items), items) : Loss::sum(sum, items);
      }));
    }
    const auto before = clones_of(model->parameters());
    note(stepper.flush());
    if (tail != Tail::Exact) {
      EXPECT_TRUE(same_bits(clones_of(model->parameters()), before));
    }
    if (tail == Tail::Carry && i == 0) {
      EXPECT_THROW((void)stepper.state_dict(), ConfigError) << "the window is open";
    }
  }
  outcome.parameters = clones_of(model->parameters());
  return outcome;
}

// A window's provisional divisor and its correction round a few times more than the division by hand: five steps of lr
// 0.1, each with a relative error of the gradient below 10 u = 6e-7.
constexpr double kRounding = 1e-6;

class AccumulateTails : public ::testing::TestWithParam<bool> {};

TEST_P(AccumulateTails, ExactStepsForTheTailWeightedByItsItems) {
  const auto outcome = by_stepper(Tail::Exact, GetParam());
  const auto p = epoch();
  EXPECT_EQ(outcome.micro_batches, (std::vector<int64_t>{3, 3, 1, 3, 3, 1}));
  EXPECT_EQ(outcome.items, (std::vector<int64_t>{24, 24, 6, 24, 24, 6})) << "two numbers for each item of the batch";
  const std::vector<std::vector<Batch>> groups{{p[0], p[1], p[2]}, {p[3], p[4], p[5]}, {p[6]}};
  EXPECT_TRUE(close_in_norm(outcome.parameters,
                            by_hand({groups[0], groups[1], groups[2], groups[0], groups[1], groups[2]}), kRounding));
}

TEST_P(AccumulateTails, DropForgetsTheTail) {
  const auto outcome = by_stepper(Tail::Drop, GetParam());
  const auto p = epoch();
  EXPECT_EQ(outcome.micro_batches, (std::vector<int64_t>{3, 3, 3, 3}));
  EXPECT_TRUE(close_in_norm(outcome.parameters,
                            by_hand({{p[0], p[1], p[2]}, {p[3], p[4], p[5]}, {p[0], p[1], p[2]}, {p[3], p[4], p[5]}}),
                            kRounding));
}

TEST_P(AccumulateTails, CarryFinishesTheTailInTheNextEpoch) {
  const auto outcome = by_stepper(Tail::Carry, GetParam());
  const auto p = epoch();
  EXPECT_EQ(outcome.micro_batches, (std::vector<int64_t>{3, 3, 3, 3}));
  EXPECT_EQ(outcome.items, (std::vector<int64_t>{24, 24, 22, 24}));
  EXPECT_TRUE(close_in_norm(outcome.parameters,
                            by_hand({{p[0], p[1], p[2]}, {p[3], p[4], p[5]}, {p[6], p[0], p[1]}, {p[2], p[3], p[4]}}),
                            kRounding));
}

INSTANTIATE_TEST_SUITE_P(, AccumulateTails, ::testing::Bool(),
                         [](const auto& of) { return of.param ? "OfMeans" : "OfSums"; });

TEST(Accumulate, OfOneIsAStepForEachMicroBatchToTheBit) {
  auto model = make_mlp({6, 16, 2});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  Stepper stepper(model, optimizer);
  std::vector<std::vector<Batch>> groups;
  for (const Batch& micro : epoch()) {
    EXPECT_TRUE(
        stepper.accumulate(micro, [&](const Batch& m) { return Loss::sum(sum_of_squares(model, m), m[1].numel()); }));
    groups.push_back({micro});
  }
  EXPECT_FALSE(stepper.flush());
  EXPECT_TRUE(same_bits(clones_of(model->parameters()), by_hand(groups)));
}

// The tail error that accumulation by hand makes: dividing seven micro-batches by three each time.
TEST(Accumulate, DividingATailByTheFullNumberWouldBeFarOff) {
  const auto exact = by_stepper(Tail::Exact, false).parameters;
  auto model = make_mlp({6, 16, 2});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  for (int i = 0; i < 2; ++i) {
    const auto parts = epoch();
    for (size_t k = 0; k < parts.size(); ++k) {
      (sum_of_squares(model, parts[k]) / static_cast<double>(parts[k][1].numel() * kAccumulate)).backward();
      if ((k + 1) % kAccumulate == 0 || k + 1 == parts.size()) {
        optimizer.step();
        optimizer.zero_grad();
      }
    }
  }
  EXPECT_FALSE(close_in_norm(model->parameters()[0], exact[0], 1e-3)) << "these tests could not tell it";
}

}  // namespace
}  // namespace snug::accumulate_test
