#include "src/core/joined_optimizers.h"

#include <algorithm>
#include <unordered_map>

#include <c10/util/ScopeExit.h>

#include "snug/core.h"
#include "src/core/optimizer_capabilities.h"

namespace snug::detail {

JoinedOptimizers::JoinedOptimizers(std::vector<torch::optim::Optimizer*> optimizers)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::make_unique<torch::optim::OptimizerOptions>()),
      optimizers_(std::move(optimizers)) {
  if (std::ranges::find(optimizers_, nullptr) != optimizers_.end()) {
    throw ConfigError("Stepper: one of the optimizers is a null pointer; give the addresses of optimizers");
  }
  for (torch::optim::Optimizer* optimizer : optimizers_) {
    const OptimizerCapabilities can = capabilities_of(*optimizer);
    const bool is_early = can.scaling != nullptr && can.update.before_writing({});
    (is_early ? early_ : late_).push_back(optimizer);
  }
  take_groups();
}

void JoinedOptimizers::take_groups() {
  param_groups_.clear();
  std::unordered_map<const void*, size_t> holders;
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    for (const auto& group : optimizers_[i]->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (holders.try_emplace(parameter.unsafeGetTensorImpl(), i).first->second != i) {
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
  if (first < early_.size()) {
    const OptimizerCapabilities can = capabilities_of(*early_[first]);
    if (found_inf.defined()) {
      can.scaling->set_gradient_scaling({}, found_inf);
    }
    bool is_reached = false;
    const auto others = [&, first] {
      is_reached = true;
      step_from(first + 1, found_inf, before_writing);
    };
    can.update.before_writing(others);  // the others allocate, and write, before this one writes
    const auto take_back = c10::make_scope_exit([&] { can.update.before_writing({}); });
    early_[first]->step();
    if (!is_reached) {  // nothing to write
      others();
    }
    return;
  }
  if (before_writing) {
    before_writing();
  }
  for (torch::optim::Optimizer* optimizer : late_) {
    GradientScalingAware* const scaling = capabilities_of(*optimizer).scaling;
    if (scaling != nullptr && found_inf.defined()) {
      scaling->set_gradient_scaling({}, found_inf);
    }
    if (scaling != nullptr || !found_inf.defined() || found_inf.item<float>() == 0) {
      optimizer->step();
    }
  }
}

void JoinedOptimizers::set_gradient_scaling(at::Tensor /*grad_scale*/, at::Tensor found_inf) {
  found_inf_ = std::move(found_inf);
}

bool JoinedOptimizers::before_writing(std::function<void()> hook) {
  const bool is_kept = std::ranges::all_of(late_, [](const auto* one) { return knows_state_to_come(*one); });
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
