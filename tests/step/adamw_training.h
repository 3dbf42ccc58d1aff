#pragma once
// A small model with AdamW and a Stepper, for tests of one step on one device.

#include <optional>
#include <vector>

#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/stepper.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::testing {

inline Batch regression_batch(int64_t items, uint64_t seed = 2) {
  torch::manual_seed(seed);
  return {torch::randn({items, 6}), torch::randn({items, 3})};
}

/// Everything that a step may change: parameters, and the tensors of the optimizer's state.
inline std::vector<torch::Tensor> everything(const torch::nn::Sequential& model, const AdamW& optimizer) {
  auto tensors = clones_of(model->parameters());
  const auto state = tensors_in(optimizer.state_dict());
  tensors.insert(tensors.end(), state.begin(), state.end());
  return tensors;
}

struct AdamWTraining {
  torch::nn::Sequential model = make_mlp({6, 16, 3});
  AdamW optimizer{model->parameters(), {.lr = 0.01}};
  Stepper stepper;

  explicit AdamWTraining(StepperOptions options = {}) : stepper(model, optimizer, options) {}

  Loss loss_of(const Batch& micro) {
    return Loss::sum((model->forward(micro[0]).to(torch::kFloat) - micro[1]).pow(2).sum(), micro[1].numel());
  }
  StepResult step(const Batch& batch) {
    return stepper.step(batch, [this](const Batch& micro) { return loss_of(micro); });
  }
  std::optional<StepResult> accumulate(const Batch& micro) {
    return stepper.accumulate(micro, [this](const Batch& m) { return loss_of(m); });
  }
  std::vector<torch::Tensor> state() const { return everything(model, optimizer); }
};

}  // namespace snug::testing
