// Every technique of a step with every other: precision x checkpointing x split x dropout x freezing between steps. The
// reference has the same mathematics: for a whole batch a plain loop, for splits a loop written by hand over the same
// parts with the same seeds. Then all that may hold on to a gradient, with freezing.

#include <memory>
#include <optional>
#include <tuple>

#include <gtest/gtest.h>

#include "snug/adamw.h"
#include "snug/autocast.h"
#include "snug/clip.h"
#include "snug/extra/ema.h"
#include "snug/sgd.h"
#include "snug/sliced.h"
#include "snug/stepper.h"
#include "tests/support/freezing.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::composition_test {
namespace {

using testing::freeze_for;
using testing::kFreezingSteps;
using torch::Tensor;

using Cell =
    std::tuple<Precision, bool, int64_t, double, bool>;  // precision, checkpointing, micro-batch, dropout, freezing

constexpr int64_t kItems = 12;
constexpr uint64_t kSeed = 9;

class Composition : public ::testing::TestWithParam<Cell> {};

std::vector<torch::Tensor> by_hand(const Cell& cell) {
  const auto [precision, checkpointing, size, dropout, freezes] = cell;
  auto model = snug::testing::tiny_model(dropout);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  const Batch batch = snug::testing::tiny_batch(kItems);
  torch::manual_seed(kSeed);
  for (int step = 0; step < kFreezingSteps; ++step) {
    freeze_for(freezes ? step : 0, *model);
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
  const auto [precision, checkpointing, size, dropout, freezes] = GetParam();
  auto model = snug::testing::tiny_model(dropout);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  Stepper stepper(model, optimizer, {.precision = precision, .micro_batch = size});
  const Batch batch = snug::testing::tiny_batch(kItems);
  torch::manual_seed(kSeed);
  for (int step = 0; step < kFreezingSteps; ++step) {
    freeze_for(freezes ? step : 0, *model);
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
    EXPECT_TRUE(snug::testing::close_in_norm(found, expected, 1e-6));
  }
}

std::string name_of(const ::testing::TestParamInfo<Cell>& info) {
  const auto [precision, checkpointing, size, dropout, freezes] = info.param;
  return std::string(to_string(precision)) + (checkpointing ? "_checkpoint" : "_plain") + "_of_" +
         std::to_string(size) + (dropout > 0 ? "_dropout" : "") + (freezes ? "_freezing" : "");
}

INSTANTIATE_TEST_SUITE_P(Table, Composition,
                         ::testing::Combine(::testing::Values(Precision::Float32, Precision::BFloat16),
                                            ::testing::Bool(), ::testing::Values<int64_t>(12, 4, 5),
                                            ::testing::Values(0.0, 0.25), ::testing::Bool()),
                         name_of);

// --- all that may hold on to a gradient

enum class Update { Sgd, TorchAdam, AdamW, AdamW8bit };
using FreezingCell =
    std::tuple<Precision, Weights, Update, double, bool, bool>;  // clipping, accumulate(), a memory budget

class Freezing : public ::testing::TestWithParam<FreezingCell> {
 protected:
  static std::unique_ptr<torch::optim::Optimizer> optimizer_of(const std::vector<Tensor>& parameters) {
    switch (std::get<Update>(GetParam())) {
      case Update::Sgd:
        return std::make_unique<SGD>(parameters, SGDOptions{.lr = 0.1, .momentum = 0.9});
      case Update::TorchAdam:
        return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01).weight_decay(0.1));
      case Update::AdamW:
        return std::make_unique<AdamW>(parameters, AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
      case Update::AdamW8bit:
        break;
    }
    return std::make_unique<AdamW8bit>(parameters, AdamW8bitOptions{.lr = 0.01, .min_elements = 64});
  }
  static torch::nn::Sequential model_of() {
    auto model = testing::tiny_model();
    if (weights() == Weights::Low) {
      model->to(compute_dtype(precision()));
    }
    return model;
  }
  static Loss loss_of(torch::nn::Sequential& model, const Batch& micro) {
    return testing::squared_error(model->forward(micro[0].to(model->parameters()[0].scalar_type())), micro[1]);
  }
  static Precision precision() { return std::get<Precision>(GetParam()); }
  static Weights weights() { return std::get<Weights>(GetParam()); }
  static double clip_norm() { return std::get<3>(GetParam()); }
  static GradScalerOptions scaling() { return {.init_scale = 256, .enabled = precision() == Precision::Float16}; }
  static constexpr int64_t kMicroBatch = 4;

  // Parameters and their averages.
  static std::vector<Tensor> by_hand();
  static std::vector<Tensor> by_stepper();
};

std::vector<Tensor> outcome(const torch::nn::Sequential& model, const Ema& ema) {
  auto result = testing::clones_of(model->parameters());
  const auto averages = testing::clones_of(ema.averages());
  result.insert(result.end(), averages.begin(), averages.end());
  return result;
}

std::vector<Tensor> Freezing::by_hand() {
  auto model = model_of();
  const auto low = model->parameters();
  std::vector<Tensor> updated;
  for (const Tensor& parameter : low) {
    updated.push_back(weights() == Weights::Low ? parameter.detach().to(torch::kFloat).requires_grad_() : parameter);
  }
  const auto optimizer = optimizer_of(updated);
  Ema ema(low, {.decay = 0.5});
  GradScaler scaler(scaling());
  const Batch batch = testing::tiny_batch(kItems);
  for (int step = 0; step < kFreezingSteps; ++step) {
    freeze_for(step, *model);
    optimizer->zero_grad();
    for (const Batch& micro : micro_batches(batch, kMicroBatch)) {
      std::optional<Autocast> autocast;
      if (precision() != Precision::Float32) {
        autocast.emplace(torch::kCPU, compute_dtype(precision()));
      }
      const Tensor loss = loss_of(model, micro).value() / static_cast<double>(batch[1].numel());
      autocast.reset();
      scaler.scale(loss).backward();
      for (size_t i = 0; weights() == Weights::Low && i < low.size(); ++i) {
        if (low[i].grad().defined()) {
          const Tensor gradient = low[i].grad().to(torch::kFloat);
          updated[i].mutable_grad() = updated[i].grad().defined() ? updated[i].grad() + gradient : gradient;
          low[i].mutable_grad().reset();
        }
      }
    }
    scaler.unscale_(*optimizer);
    if (clip_norm() > 0) {
      clip_grad_norm_(updated, clip_norm());
    }
    scaler.step(*optimizer);
    scaler.update();
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; weights() == Weights::Low && i < low.size(); ++i) {
      low[i].copy_(updated[i]);
    }
    ema.update();
  }
  return outcome(model, ema);
}

std::vector<Tensor> Freezing::by_stepper() {
  const auto [precision, weights, update, clip_norm, accumulates, has_budget] = GetParam();
  auto model = model_of();
  const auto optimizer = optimizer_of(model->parameters());
  Ema ema(model->parameters(), {.decay = 0.5});
  StepperOptions options{.precision = precision,
                         .weights = weights,
                         .clip_norm = clip_norm,
                         .sixteen_bit = {.scaler = {.init_scale = 256}}};
  (accumulates ? options.accumulate.every : options.micro_batch) = accumulates ? kItems / kMicroBatch : kMicroBatch;
  if (has_budget) {
    options.budget.memory = Bytes(1 << 30);
  }
  Stepper stepper(model, *optimizer, options);
  const Batch batch = testing::tiny_batch(kItems);
  const auto loss = [&](const Batch& micro) { return loss_of(model, micro); };
  for (int step = 0; step < kFreezingSteps; ++step) {
    freeze_for(step, *model);
    if (accumulates) {
      for (const Batch& micro : micro_batches(batch, kMicroBatch)) {
        stepper.accumulate(micro, loss);
      }
    } else {
      stepper.step(batch, loss);
    }
    ema.update();
  }
  return outcome(model, ema);
}

TEST_P(Freezing, EqualsTheLoopWrittenByHand) { EXPECT_TRUE(testing::same_bits(by_stepper(), by_hand())); }

std::string name_of_freezing(const ::testing::TestParamInfo<FreezingCell>& info) {
  const auto [precision, weights, update, clip_norm, accumulates, has_budget] = info.param;
  constexpr const char* kUpdates[] = {"sgd", "torch_adam", "adamw", "adamw8bit"};
  return std::string(to_string(precision)) + (weights == Weights::Low ? "_low_" : "_") +
         kUpdates[static_cast<size_t>(update)] + (clip_norm > 0 ? "_clipped" : "") +
         (accumulates ? "_accumulate" : "") + (has_budget ? "_budget" : "");
}

INSTANTIATE_TEST_SUITE_P(
    Full, Freezing,
    ::testing::Combine(::testing::Values(Precision::Float32, Precision::Float16), ::testing::Values(Weights::Full),
                       ::testing::Values(Update::Sgd, Update::TorchAdam, Update::AdamW, Update::AdamW8bit),
                       ::testing::Values(0.0, 0.05), ::testing::Bool(), ::testing::Bool()),
    name_of_freezing);
INSTANTIATE_TEST_SUITE_P(Low, Freezing,
                         ::testing::Combine(::testing::Values(Precision::BFloat16, Precision::Float16),
                                            ::testing::Values(Weights::Low),
                                            ::testing::Values(Update::TorchAdam, Update::AdamW, Update::AdamW8bit),
                                            ::testing::Values(0.0, 0.05), ::testing::Bool(), ::testing::Bool()),
                         name_of_freezing);

}  // namespace
}  // namespace snug::composition_test
