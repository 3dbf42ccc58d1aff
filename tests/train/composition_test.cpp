// Every technique of a step with every other: precision x checkpointing x split x dropout. The reference has the same mathematics: for a
// whole batch a plain loop, for splits a loop written by hand over the same parts with the same seeds.

#include <optional>
#include <tuple>

#include <gtest/gtest.h>

#include "snug/activations/sequential.h"
#include "snug/precision/autocast.h"
#include "snug/train/stepper.h"
#include "tests/support/tensors.h"
#include "tests/support/tiny_model.h"

namespace snug {
namespace {

using Cell = std::tuple<Precision, bool, int64_t, double>;  // precision, checkpointing, micro-batch, dropout

constexpr int64_t kItems = 12;
constexpr int kSteps = 3;
constexpr uint64_t kSeed = 9;

class Composition : public ::testing::TestWithParam<Cell> {};

std::vector<torch::Tensor> by_hand(const Cell& cell) {
  const auto [precision, checkpointing, size, dropout] = cell;
  auto model = snug::testing::tiny_model(dropout);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  const Batch batch = snug::testing::tiny_batch(kItems);
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
        loss = snug::testing::squared_error(model->forward(micro[0]), micro[1]).value() /
               static_cast<double>(batch[1].numel());
      }
      loss.backward();
    }
    optimizer.step();
  }
  return snug::testing::clones_of(model->parameters());
}

TEST_P(Composition, EqualsTheLoopWrittenByHand) {
  const auto [precision, checkpointing, size, dropout] = GetParam();
  auto model = snug::testing::tiny_model(dropout);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  Stepper stepper(model, optimizer, {.precision = precision, .micro_batch = size});
  const Batch batch = snug::testing::tiny_batch(kItems);
  torch::manual_seed(kSeed);
  for (int step = 0; step < kSteps; ++step) {
    stepper.step(batch, [&, checkpoint = checkpointing](const Batch& micro) {
      const auto y =
          checkpoint ? checkpoint_sequential(model, 2, micro[0], LastSegment::Recompute) : model->forward(micro[0]);
      return snug::testing::squared_error(y, micro[1]);
    });
  }
  const auto expected = by_hand(GetParam());
  const auto found = snug::testing::clones_of(model->parameters());
  if (kItems % size == 0) {
    // Even splits: the provisional divisor is the final one, so even the rounding is the same.
    EXPECT_TRUE(snug::testing::same_bits(found, expected));
  } else {
    // An uneven tail: expected_parts = 12 / 5 predicts the count exactly here, too.
    EXPECT_LT(snug::testing::relative_difference(found, expected), 1e-6);
  }
}

std::string name_of(const ::testing::TestParamInfo<Cell>& info) {
  const auto [precision, checkpointing, size, dropout] = info.param;
  return std::string(to_string(precision)) + (checkpointing ? "_checkpoint" : "_plain") + "_of_" +
         std::to_string(size) + (dropout > 0 ? "_dropout" : "");
}

INSTANTIATE_TEST_SUITE_P(Table, Composition,
                         ::testing::Combine(::testing::Values(Precision::Float32, Precision::BFloat16),
                                            ::testing::Bool(), ::testing::Values<int64_t>(12, 4, 5),
                                            ::testing::Values(0.0, 0.25)),
                         name_of);

}  // namespace
}  // namespace snug
