#include "snug/fused_optimizer.h"

#include <algorithm>
#include <unordered_set>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fmt/ranges.h>

#include "snug/core.h"
#include "src/core/allocated_bytes.h"
#include "src/core/lazy_values.h"
#include "src/optim/fused_optimizer_parts.h"
#include "src/precision/low_precision.h"

namespace snug {
namespace {

// Refuses parameters that torch's constructor refuses without naming the parameter. The optimizer has no name yet.
const std::vector<torch::optim::OptimizerParamGroup>& with_leaves(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  size_t place = 0;
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.defined()) {
        throw ConfigError(
            fmt::format("Optimizer: parameter {} is undefined; does its module have it, or was it turned off?", place));
      }
      if (!parameter.is_leaf()) {
        throw ConfigError(
            fmt::format("Optimizer: parameter {} of shape [{}] is the result of an operation, whose gradient autograd "
                        "does not keep; give the tensor that it was made of, or detach() it",
                        place, fmt::join(parameter.sizes(), ", ")));
      }
      ++place;
    }
  }
  return groups;
}

size_t number_of(const at::Tensor& parameter, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  size_t number = 0;
  for (const auto& group : groups) {
    for (const at::Tensor& p : group.params()) {
      if (p.is_same(parameter)) {
        return number;
      }
      ++number;
    }
  }
  return number;
}

}  // namespace

const at::Tensor& FusedOptimizer::ParameterState::at(std::string_view name) const {
  const auto entry = std::find_if(tensors.begin(), tensors.end(), [&](const auto& e) { return e.first == name; });
  TORCH_INTERNAL_ASSERT(entry != tensors.end());
  return entry->second;
}

bool FusedOptimizer::ParameterState::contains(std::string_view name) const {
  return std::any_of(tensors.begin(), tensors.end(), [&](const auto& e) { return e.first == name; });
}

std::vector<at::Tensor> FusedOptimizer::Work::states_named(std::string_view name) const {
  std::vector<at::Tensor> tensors;
  for (ParameterState* state : states) {
    tensors.push_back(state->at(name));
  }
  return tensors;
}

FusedOptimizer::FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                               std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                               const detail::OptionRules& rules)
    : torch::optim::Optimizer(with_leaves(groups), std::move(defaults)), rules_(&rules) {}

std::string_view FusedOptimizer::name() const { return rules_->optimizer; }

std::string_view FusedOptimizer::why_not() const {
  return "only FP32 and FP64 can be updated without losing small steps to rounding. Keep the model in FP32 and compute "
         "in 16 bits under Autocast, or let a Stepper hold masters (Weights::Low), or MasterWeights";
}

std::vector<at::Tensor> FusedOptimizer::without_repeats(std::vector<at::Tensor> parameters) {
  std::unordered_set<const void*> seen;
  std::erase_if(parameters, [&](const at::Tensor& p) { return !seen.insert(p.unsafeGetTensorImpl()).second; });
  return parameters;
}

void FusedOptimizer::name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& names) {
  for (const auto& [name, parameter] : names) {
    names_.insert_or_assign(parameter.unsafeGetTensorImpl(), name);
  }
}

std::string FusedOptimizer::describe(const at::Tensor& parameter) const {
  if (const auto known = names_.find(parameter.unsafeGetTensorImpl()); known != names_.end()) {
    return fmt::format("parameter '{}'", known->second);
  }
  if (parameter.is_meta()) {  // stands for a parameter while the state is planned
    return fmt::format("a parameter of shape [{}]", fmt::join(parameter.sizes(), ", "));
  }
  return fmt::format("parameter {}", number_of(parameter, param_groups_));
}

void FusedOptimizer::number_elements(const std::vector<uint64_t>& first) {
  size_t number = 0;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      first_elements_[parameter.unsafeGetTensorImpl()] = first.at(number++);
    }
  }
}

// --- groups

// torch's base class silently replaces options by the defaults, if torch does not know the options or the options are
// not of the defaults' type.
void FusedOptimizer::take_options(torch::optim::OptimizerParamGroup& group,
                                  const torch::optim::OptimizerParamGroup& given) const {
  if (given.has_options()) {
    check_options(given.options());
    if (!rules_->are_torchs) {
      group.set_options(given.options().clone());
    }
  }
}

void FusedOptimizer::finish_construction(const std::vector<torch::optim::OptimizerParamGroup>& given) {
  for (size_t g = 0; g < given.size(); ++g) {
    take_options(param_groups_[g], given[g]);
  }
  check_groups();
}

void FusedOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  torch::optim::Optimizer::add_param_group(with_leaves({group}).front());
  auto take_back = c10::make_scope_exit([&] { param_groups_.pop_back(); });
  take_options(param_groups_.back(), group);
  check_groups();
  take_back.release();
}

// --- checks

void FusedOptimizer::check_options(const torch::optim::OptimizerOptions& options) const {
  rules_->check(name(), options);
}

void FusedOptimizer::check_groups() const {
  std::unordered_set<const void*> seen;
  for (const auto& group : param_groups_) {
    check_options(group.options());
    for (const at::Tensor& parameter : group.params()) {
      check_parameter(parameter);
      check_in_group(parameter, group.options());
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
        throw ConfigError(fmt::format("{}: {} is in the groups twice; give each once", name(), describe(parameter)));
      }
    }
  }
  if (seen.empty()) {
    throw ConfigError(fmt::format("{}: there are no parameters; was the model built before the optimizer?", name()));
  }
}

void FusedOptimizer::check_type(const at::Tensor& parameter) const {
  if (!takes(parameter.scalar_type())) {
    throw ConfigError(fmt::format("{}: {} of shape [{}] is {}; {}", name(), describe(parameter),
                                  fmt::join(parameter.sizes(), ", "), c10::toString(parameter.scalar_type()),
                                  why_not()));
  }
}

// A Stepper may replace 16-bit parameters by masters before the first step, so the first step checks the parameters'
// type again.
void FusedOptimizer::check_parameter(const at::Tensor& parameter) const {
  if (!detail::is_low(parameter)) {
    check_type(parameter);
  }
  if (!parameter.is_non_overlapping_and_dense()) {
    throw ConfigError(
        fmt::format("{}: {} of shape [{}] is a view with gaps, which the kernel would write over; make it contiguous()",
                    name(), describe(parameter), fmt::join(parameter.sizes(), ", ")));
  }
  if (detail::is_lazy(parameter)) {
    throw ConfigError(
        fmt::format("{}: {} of shape [{}] is a view whose memory has the negative of its values, or the conjugate; "
                    "clone() it",
                    name(), describe(parameter), fmt::join(parameter.sizes(), ", ")));
  }
}

FusedOptimizer::ParameterState FusedOptimizer::state_without_memory(
    const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) const {
  ParameterState state;
  const auto dtype = takes(parameter.scalar_type()) ? parameter.scalar_type() : at::kFloat;  // for the master
  state.made_for = at::empty_like(parameter, parameter.options().device(at::kMeta).dtype(dtype));
  state.device = parameter.device();
  make_state(state, state.made_for, options);
  return state;
}

int64_t FusedOptimizer::state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& gets_gradient) const {
  int64_t bytes = 0;
  for (const auto& group : param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (state_.count(parameter.unsafeGetTensorImpl()) == 0 && gets_gradient(parameter)) {
        for (const auto& [tensor_name, tensor] : state_without_memory(parameter, group.options()).tensors) {
          const bool is_outside = outside_ && (tensor.dim() > 0 || !parameter.is_cpu());
          bytes += is_outside ? 0 : detail::allocated_bytes(static_cast<int64_t>(tensor.nbytes()), parameter.device());
        }
      }
    }
  }
  return bytes;
}

}  // namespace snug
