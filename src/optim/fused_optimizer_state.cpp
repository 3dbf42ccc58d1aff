// FusedOptimizer's state: saved and loaded, on the device or outside.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include "snug/core.h"
#include "snug/fused_optimizer.h"
#include "src/core/allocated_bytes.h"
#include "src/core/optimizer_capabilities.h"
#include "src/core/unnamed_file.h"
#include "src/optim/state_archive.h"
#include "src/optim/state_outside.h"

namespace snug {

// --- saved and loaded

StateDict FusedOptimizer::state_dict() const {
  outside_ ? outside_->late().make() : void();
  StateDict states;
  StateDict groups;
  int64_t index = 0;
  const auto memory = outside_ ? outside_->mapped() : nullptr;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& group = param_groups_[g];
    check_options(group.options());
    StateDict options = rules_->to_state(group.options());
    StateDict places;
    for (const at::Tensor& parameter : group.params()) {
      const auto known = state_.find(parameter.unsafeGetTensorImpl());
      const auto* state = known == state_.end() ? nullptr : static_cast<const ParameterState*>(known->second.get());
      if (state != nullptr && !state->is_fresh) {
        StateDict entry;
        for (const auto& [tensor_name, tensor] : state->tensors) {
          entry.set(std::string(tensor_name), StateOutside::lent(*state, tensor_name, memory));
        }
        states.set(std::to_string(index), std::move(entry));
      }
      places.set(std::to_string(places.size()), index++);
    }
    options.set("params", std::move(places));
    groups.set(std::to_string(g), std::move(options));
  }
  StateDict result;
  result.set("state", std::move(states));
  result.set("param_groups", std::move(groups));
  return result;
}

std::unique_ptr<FusedOptimizer::ParameterState> FusedOptimizer::copy_of_state(
    const StateDict& saved, const at::Tensor& parameter, const torch::optim::OptimizerOptions& options,
    StateOutside* outside) const {
  auto state = std::make_unique<ParameterState>(state_without_memory(parameter, options));
  if (const auto optional = optional_state()) {
    std::erase_if(state->tensors, [&](const auto& entry) { return entry.first == *optional; });
    if (saved.contains(std::string(*optional))) {
      state->tensors.emplace_back(*optional, at::empty_like(state->made_for, at::MemoryFormat::Preserve));
    }
  }
  for (auto& [tensor_name, tensor] : state->tensors) {
    const auto& value = saved.get<at::Tensor>(std::string(tensor_name));
    if (!value.defined() || value.sizes() != tensor.sizes()) {
      throw CorruptFile(fmt::format(
          "{}.load_state_dict: {} of {} {}, it should have [{}]; was this state saved for another model?", name(),
          tensor_name, describe(parameter),
          value.defined() ? fmt::format("has shape [{}]", fmt::join(value.sizes(), ", ")) : "is an undefined tensor",
          fmt::join(tensor.sizes(), ", ")));
    }
    if (value.scalar_type() != tensor.scalar_type() && !(value.is_floating_point() && tensor.is_floating_point())) {
      throw CorruptFile(fmt::format(
          "{}.load_state_dict: {} of {} is {}, it should be {}; was it saved by another optimizer?", name(),
          tensor_name, describe(parameter), c10::toString(value.scalar_type()), c10::toString(tensor.scalar_type())));
    }
  }
  if (saved.size() != state->tensors.size()) {
    throw CorruptFile(fmt::format(
        "{}.load_state_dict: the state of {} has {} tensors, it should have {}; was it saved by an optimizer with "
        "other options?",
        name(), describe(parameter), saved.size(), state->tensors.size()));
  }
  if (outside != nullptr) {
    outside->place(*state);
  }
  for (auto& [tensor_name, tensor] : state->tensors) {
    const auto& value = saved.get<at::Tensor>(std::string(tensor_name));
    if (outside != nullptr) {
      outside->write(*state, tensor_name, value);
    } else {
      tensor =
          at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(parameter.device())).copy_(value);
    }
  }
  state->is_fresh = false;
  return state;
}

// Unlike state_dict(), makes no late updates: the tensors stay the same.
std::vector<at::Tensor> FusedOptimizer::state_tensors() const {
  const auto memory = outside_ ? outside_->mapped() : nullptr;
  std::vector<at::Tensor> tensors;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      const auto known = state_.find(parameter.unsafeGetTensorImpl());
      const auto* state = known == state_.end() ? nullptr : static_cast<const ParameterState*>(known->second.get());
      if (state != nullptr && !state->is_fresh) {
        for (const auto& [name, tensor] : state->tensors) {
          tensors.push_back(StateOutside::lent(*state, name, memory));
        }
      }
    }
  }
  return tensors;
}

void FusedOptimizer::load_state_dict(const StateDict& dict) {
  try {
    outside_ ? outside_->late().make() : void();
  } catch (const std::exception&) {  // a half-made update, after which the program loads model and optimizer
  }
  const at::NoGradGuard no_grad;
  const auto& states = dict.get<StateDict>("state");
  const auto& groups = dict.get<StateDict>("param_groups");
  if (groups.size() != param_groups_.size()) {
    throw CorruptFile(fmt::format("{}.load_state_dict: the state has {} parameter groups, this optimizer {}", name(),
                                  groups.size(), param_groups_.size()));
  }
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> new_options;
  std::vector<std::pair<void*, std::unique_ptr<ParameterState>>> new_states;
  auto new_place =
      outside_ ? std::make_unique<StateOutside>(outside_->placement(), state_multiple(), outside_->calls()) : nullptr;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& saved = groups.get<StateDict>(std::to_string(g));
    const auto& parameters = param_groups_[g].params();
    check_options(param_groups_[g].options());
    const auto& places = saved.get<StateDict>("params");
    if (places.size() != parameters.size()) {
      throw CorruptFile(fmt::format("{}.load_state_dict: group {} of the state has {} parameters, this optimizer's {}",
                                    name(), g, places.size(), parameters.size()));
    }
    new_options.push_back(rules_->from_state(name(), saved));
    check_options(*new_options.back());
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::string key = std::to_string(places.get<int64_t>(std::to_string(i)));
      if (states.contains(key)) {
        new_states.emplace_back(
            parameters[i].unsafeGetTensorImpl(),
            copy_of_state(states.get<StateDict>(key), parameters[i], *new_options.back(), new_place.get()));
      }
    }
  }
  if (new_states.size() != states.size()) {
    throw CorruptFile(fmt::format("{}.load_state_dict: the state is of {} parameters, of which this optimizer has {}",
                                  name(), states.size(), new_states.size()));
  }
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    param_groups_[g].set_options(std::move(new_options[g]));
  }
  state_.clear();
  for (auto& [key, state] : new_states) {
    state_[key] = std::move(state);
  }
  outside_ = std::move(new_place);
  half_made_.clear();
}

// --- on the device, on the host, or in a file. A move makes new tensors for the whole state, scalars too: earlier
// state_dict()s keep the old tensors.

bool FusedOptimizer::is_on_cpu() const {
  return std::ranges::all_of(param_groups_, [](const auto& group) {
    return std::ranges::all_of(group.params(), [](const at::Tensor& parameter) { return parameter.is_cpu(); });
  });
}

bool FusedOptimizer::keep_state_in(const StatePlacement& place) {
  const bool stays =
      std::holds_alternative<StateOnDevice>(place) || (std::holds_alternative<StateOnHost>(place) && is_on_cpu());
  if (stays ? !may_stay_on_device() : !state_may_leave()) {
    return false;
  }
  if (stays) {
    bring_state_back();
  } else {
    keep_state_in(place, detail::SpillCalls::real());
  }
  return true;
}

StatePlacement FusedOptimizer::state_placement() const { return outside_ ? outside_->placement() : StateOnDevice(); }

void FusedOptimizer::keep_state_in(StatePlacement place, detail::SpillCalls& calls) {
  detail::check_window(name(), place);
  if (auto* const file = std::get_if<StateFile>(&place)) {
    file->directory = detail::lasting(file->directory);
  }
  outside_ ? outside_->late().make() : void();
  const at::NoGradGuard no_grad;
  auto next = std::make_unique<StateOutside>(place, state_multiple(), calls);
  const auto memory = outside_ ? outside_->mapped() : nullptr;
  std::vector<std::pair<void*, std::unique_ptr<ParameterState>>> moved;
  for (const auto& [key, known] : state_) {
    const auto& state = static_cast<const ParameterState&>(*known);
    auto& to = *moved.emplace_back(key, std::make_unique<ParameterState>(state)).second;
    to.in_file.clear();
    for (auto& [tensor_name, tensor] : to.tensors) {
      tensor = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    }
    next->place(to);
    for (const auto& [tensor_name, tensor] : to.tensors) {
      next->write(to, tensor_name, StateOutside::lent(state, tensor_name, memory));
    }
  }
  for (auto& [key, state] : moved) {
    state_[key] = std::move(state);
  }
  outside_ = std::move(next);
}

void FusedOptimizer::bring_state_back() {
  if (!outside_) {
    return;
  }
  outside_->late().make();
  const at::NoGradGuard no_grad;
  std::vector<std::pair<ParameterState*, ParameterState>> moved;
  for (const auto& [key, known] : state_) {
    auto& state = static_cast<ParameterState&>(*known);
    ParameterState& to = moved.emplace_back(&state, state).second;
    for (auto& [tensor_name, tensor] : to.tensors) {
      const bool is_copy = state.in_file.contains(tensor_name);
      tensor = outside_->read(state, tensor_name).to(state.device, /*non_blocking=*/false, /*copy=*/!is_copy);
    }
    to.in_file.clear();
  }
  for (auto& [state, to] : moved) {
    *state = std::move(to);
  }
  outside_.reset();
}

// The states of all trained parameters, existing or still to be made.
std::vector<FusedOptimizer::ParameterState> FusedOptimizer::states_to_be() const {
  std::vector<ParameterState> states;
  for (const auto& group : param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto known = state_.find(parameter.unsafeGetTensorImpl());
      if (known != state_.end()) {
        states.push_back(static_cast<const ParameterState&>(*known->second));
      } else if (parameter.requires_grad()) {
        states.push_back(state_without_memory(parameter, group.options()));
      }
    }
  }
  return states;
}

MovableState::PlacementBytes FusedOptimizer::bytes_with_state_in(const StatePlacement& place) const {
  const auto* file = std::get_if<StateFile>(&place);
  const bool is_cpu = is_on_cpu();
  if (!state_may_leave() || std::holds_alternative<StateOnDevice>(place) || (file == nullptr && is_cpu)) {
    return {};
  }
  const std::vector<ParameterState> states = states_to_be();
  MovableState::PlacementBytes bytes;
  if (is_cpu) {  // otherwise the window is in the host's memory
    bytes.workspace = StateOutside::workspace_bytes(states, *file, state_multiple());
  }
  for (const ParameterState& state : states) {
    for (const auto& [tensor_name, tensor] : state.tensors) {
      const bool leaves = tensor.dim() > 0 || !state.device.is_cpu();
      bytes.moved += leaves ? detail::allocated_bytes(static_cast<int64_t>(tensor.nbytes()), state.device) : 0;
    }
  }
  return bytes;
}

void FusedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  detail::write_state(archive, state_dict());
}

void FusedOptimizer::load(torch::serialize::InputArchive& archive) { load_state_dict(detail::read_state(archive)); }

}  // namespace snug
