#include "snug/step/detail/optimizer_bytes.h"

#include <algorithm>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "snug/core/detail/allocated_bytes.h"
#include "snug/core/stateful_optimizer.h"
#include "snug/remat/detail/effect_journal.h"

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
      largest = std::max(largest, allocated_bytes(parameter));
    }
  }
  return 3 * largest;
}

int64_t state_bytes_to_come(const torch::optim::Optimizer& optimizer,
                            const std::function<bool(const at::Tensor&)>& gets_gradient) {
  if (const auto* stateful = dynamic_cast<const StatefulOptimizer*>(&optimizer)) {
    return stateful->state_bytes_to_come_of(gets_gradient);
  }
  int64_t bytes = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (optimizer.state().count(parameter.unsafeGetTensorImpl()) == 0 && gets_gradient(parameter)) {
        bytes += numbers_kept(group.options()) * allocated_bytes(parameter);
      }
    }
  }
  return bytes;
}

int64_t state_bytes_to_come(const torch::optim::Optimizer& optimizer) {
  return state_bytes_to_come(optimizer, [](const at::Tensor& parameter) { return parameter.requires_grad(); });
}

StateToCome::StateToCome(const torch::optim::Optimizer& optimizer, const TrainedParameters& parameters)
    : optimizer_(optimizer), parameters_(parameters), bytes_(state_bytes_to_come(optimizer)) {}

void StateToCome::note(const at::Tensor& loss) {
  for (const at::Tensor& leaf : leaves_of(loss)) {
    reached_.insert(parameters_.accumulated_for(leaf).unsafeGetTensorImpl());
  }
}

int64_t StateToCome::idle_bytes() const {
  return bytes_ - state_bytes_to_come(optimizer_, [this](const at::Tensor& parameter) {
           return parameter.requires_grad() && reached_.contains(parameter.unsafeGetTensorImpl());
         });
}

}  // namespace snug::detail
