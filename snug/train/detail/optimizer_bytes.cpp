#include "snug/train/detail/optimizer_bytes.h"

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "snug/core/stateful_optimizer.h"

namespace snug::detail {
namespace {

// How many numbers of a parameter's type torch's optimizers keep for each of its elements.
int64_t numbers_kept(const torch::optim::OptimizerOptions& options) {
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options)) {
    return adam->amsgrad() ? 3 : 2;
  }
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) {
    return adamw->amsgrad() ? 3 : 2;
  }
  if (const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropOptions*>(&options)) {
    return 1 + (rmsprop->momentum() > 0 ? 1 : 0) + (rmsprop->centered() ? 1 : 0);
  }
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    return sgd->momentum() != 0 ? 1 : 0;
  }
  return 0;
}

}  // namespace

int64_t workspace_bytes(const torch::optim::Optimizer& optimizer) {
  if (const auto* stateful = dynamic_cast<const StatefulOptimizer*>(&optimizer)) {
    return stateful->workspace_bytes();
  }
  int64_t largest = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      largest = std::max(largest, static_cast<int64_t>(parameter.nbytes()));
    }
  }
  return 3 * largest;
}

int64_t state_bytes_to_come(const torch::optim::Optimizer& optimizer) {
  if (const auto* stateful = dynamic_cast<const StatefulOptimizer*>(&optimizer)) {
    return stateful->state_bytes_to_come();
  }
  int64_t bytes = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.requires_grad() && optimizer.state().count(parameter.unsafeGetTensorImpl()) == 0) {
        bytes += numbers_kept(group.options()) * static_cast<int64_t>(parameter.nbytes());
      }
    }
  }
  return bytes;
}

}  // namespace snug::detail
