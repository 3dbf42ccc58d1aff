#include "src/core/joined_optimizers.h"

#include <algorithm>
#include <unordered_set>

#include "snug/core.h"
#include "src/core/optimizer_capabilities.h"

namespace snug::detail {

JoinedOptimizers::JoinedOptimizers(std::vector<torch::optim::Optimizer*> optimizers)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::make_unique<torch::optim::OptimizerOptions>()),
      optimizers_(std::move(optimizers)) {
  if (std::ranges::find(optimizers_, nullptr) != optimizers_.end()) {
    throw ConfigError("Stepper: one of the optimizers is a null pointer; give the addresses of optimizers");
  }
  take_groups();
}

void JoinedOptimizers::take_groups() {
  param_groups_.clear();
  std::unordered_set<const void*> held;
  for (torch::optim::Optimizer* optimizer : optimizers_) {
    for (const auto& group : optimizer->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (!held.insert(parameter.unsafeGetTensorImpl()).second) {
          throw ConfigError("Stepper: two of the optimizers hold the same parameter; give each parameter to one");
        }
      }
      param_groups_.emplace_back(group.params());
    }
  }
}

at::Tensor JoinedOptimizers::step(LossClosure /*closure*/) {
  const at::Tensor found_inf = std::exchange(found_inf_, {});
  step_from(0, found_inf, std::exchange(before_writing_, {}));
  return {};
}

void JoinedOptimizers::step_from(size_t first, const at::Tensor& found_inf,
                                 const std::function<void()>& before_writing) {
  if (first == optimizers_.size()) {
    return;
  }
  torch::optim::Optimizer& optimizer = *optimizers_[first];
  const OptimizerCapabilities can = capabilities_of(optimizer);
  if (can.scaling != nullptr && found_inf.defined()) {
    can.scaling->set_gradient_scaling({}, found_inf);
  }
  if (before_writing) {  // the others allocate, and write, before this one writes
    const bool is_last = first + 1 == optimizers_.size();
    can.update.before_writing(is_last ? before_writing
                                      : [&, first] { step_from(first + 1, found_inf, before_writing); });
    optimizer.step();
    return;
  }
  if (can.scaling != nullptr || !found_inf.defined() || found_inf.item<float>() == 0) {
    optimizer.step();
  }
  step_from(first + 1, found_inf, before_writing);
}

void JoinedOptimizers::set_gradient_scaling(at::Tensor /*grad_scale*/, at::Tensor found_inf) {
  found_inf_ = std::move(found_inf);
}

bool JoinedOptimizers::takes(c10::ScalarType dtype) const {
  return std::ranges::all_of(optimizers_, [&](auto* one) { return capabilities_of(*one).update.takes(dtype); });
}

bool JoinedOptimizers::allocate_before_writing() const {
  return std::ranges::all_of(optimizers_, [](auto* one) { return capabilities_of(*one).update.before_writing({}); });
}

bool JoinedOptimizers::before_writing(std::function<void()> hook) {
  const bool is_kept = allocate_before_writing();
  before_writing_ = is_kept ? std::move(hook) : nullptr;
  return is_kept;
}

bool JoinedOptimizers::agrees_across_ranks() const {
  return std::ranges::any_of(optimizers_, [](auto* one) { return capabilities_of(*one).update.agrees_across_ranks(); });
}

void JoinedOptimizers::name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& names) {
  for (torch::optim::Optimizer* optimizer : optimizers_) {
    capabilities_of(*optimizer).update.name_parameters(names);
  }
}

}  // namespace snug::detail
