#pragma once
// A small training under a memory budget, and what it takes without.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/state.h"
#include "snug/stepper.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::testing::planned {

using torch::Tensor;
namespace nn = torch::nn;

inline constexpr int64_t kWidth = 32;

inline int64_t live(c10::Device device = torch::kCPU) { return live_bytes(device).count(); }

inline Batch make_batch(int64_t items, uint64_t seed = 7) {
  torch::manual_seed(seed);
  return {torch::randn({items, kWidth}), torch::randn({items, kWidth})};
}

inline nn::Sequential deep(double dropout = 0) { return make_mlp({32, 64, 64, 64, 64, 64, 64, 32}, dropout); }

inline nn::Sequential with_batch_norm() {
  torch::manual_seed(3);
  nn::Sequential model;
  for (int i = 0; i < 3; ++i) {
    model->push_back(nn::Linear(kWidth, kWidth));
    model->push_back(nn::BatchNorm1d(kWidth));
    model->push_back(nn::GELU());
  }
  return model;
}

// All that it computes is saved.
inline nn::Sequential very_deep() {
  torch::manual_seed(3);
  nn::Sequential model;
  for (int i = 0; i < 32; ++i) {
    model->push_back(nn::Linear(kWidth, kWidth));
    model->push_back(nn::Sigmoid());
  }
  return model;
}
inline Batch two_large_items() {
  torch::manual_seed(7);
  return {torch::randn({2, 8192, kWidth}), torch::randn({2, 8192, kWidth})};
}

struct PlannedTraining {
  nn::Sequential model;
  AdamW optimizer{model->parameters(), {.lr = 0.01}};
  Stepper stepper;
  int calls = 0;

  explicit PlannedTraining(StepperOptions options = {}, nn::Sequential of = deep())
      : model(std::move(of)), stepper(model, optimizer, options) {}

  Loss loss_of(const Batch& micro) {
    ++calls;
    return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
  }
  StepResult step(const Batch& batch) {
    return stepper.step(batch, [this](const Batch& micro) { return loss_of(micro); });
  }
  std::vector<Tensor> state() const {
    auto tensors = clones_of(model->parameters());
    for (const Tensor& buffer : model->buffers()) {
      tensors.push_back(buffer.clone());
    }
    const auto of_optimizer = tensors_in(optimizer.state_dict());
    tensors.insert(tensors.end(), of_optimizer.begin(), of_optimizer.end());
    return tensors;
  }
};

// The saved state of a Stepper that chose micro-batches of `from` items, as if it had chosen `to` items.
inline StateDict with_micro_batch(StateDict state, int64_t from, int64_t to) {
  auto text = state.get<std::string>("micro_batches");
  const std::string before = fmt::format("\"items\":{},", from);
  const size_t at = text.find(before);
  EXPECT_NE(at, std::string::npos) << text;
  if (at != std::string::npos) {
    state.set("micro_batches", text.replace(at, before.size(), fmt::format("\"items\":{},", to)));
  }
  return state;
}

// What a step of plain training takes in all, once the optimizer has its state, above what is alive without the
// PlannedTraining.
inline int64_t plain_bytes(const Batch& batch, StepperOptions options, const std::function<nn::Sequential()>& make,
                           c10::Device device = torch::kCPU) {
  const int64_t before = live(device);
  PlannedTraining plain(options, make());
  plain.step(batch);
  return plain.step(batch).peak_bytes - before;
}

// A budget for a step of the batch, in micro-batches of any size, above what is alive without the PlannedTraining: the
// smallest that is named, once the budget is large enough for something of the step to run.
inline int64_t smallest_bytes(const Batch& batch, StepperOptions options, const std::function<nn::Sequential()>& make,
                              c10::Device device = torch::kCPU) {
  for (int64_t room = 32 << 10;; room += room / 4) {
    const int64_t before = live(device);
    PlannedTraining tight({}, make());
    options.budget.memory = Bytes(MemoryLimit::smallest(device).count() + room);
    Stepper stepper(tight.model, tight.optimizer, options);
    try {
      stepper.step(batch, [&](const Batch& micro) { return tight.loss_of(micro); });
      return options.budget.memory.count() - before;
    } catch (const BudgetExceeded& error) {
      if (error.smallest_feasible().count() > 0) {
        return error.smallest_feasible().count() - before;
      }
    }
  }
}

}  // namespace snug::testing::planned
