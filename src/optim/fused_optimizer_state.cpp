// FusedOptimizer's state: saved and loaded, in memory or in a file.

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
#include "src/core/optimizer_capabilities.h"
#include "src/core/unnamed_file.h"
#include "src/optim/state_archive.h"
#include "src/optim/state_in_file.h"

namespace snug {

// --- saved and loaded

StateDict FusedOptimizer::state_dict() const {
  StateDict states;
  StateDict groups;
  int64_t index = 0;
  const auto memory = in_file_ ? in_file_->mapped() : nullptr;
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
          entry.set(std::string(tensor_name),
                    state->in_file.contains(tensor_name) ? StateInFile::lent(*state, tensor_name, memory) : tensor);
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
    StateInFile* in_file) const {
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
  if (in_file != nullptr) {
    in_file->place(*state);
  }
  for (auto& [tensor_name, tensor] : state->tensors) {
    const auto& value = saved.get<at::Tensor>(std::string(tensor_name));
    if (state->in_file.contains(tensor_name)) {
      in_file->write(*state, tensor_name, value);
    } else {
      tensor =
          at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(parameter.device())).copy_(value);
    }
  }
  state->is_fresh = false;
  return state;
}

std::vector<at::Tensor> FusedOptimizer::state_tensors() const { return detail::tensors_in(state_dict()); }

void FusedOptimizer::load_state_dict(const StateDict& dict) {
  const at::NoGradGuard no_grad;
  const auto& states = dict.get<StateDict>("state");
  const auto& groups = dict.get<StateDict>("param_groups");
  if (groups.size() != param_groups_.size()) {
    throw CorruptFile(fmt::format("{}.load_state_dict: the state has {} parameter groups, this optimizer {}", name(),
                                  groups.size(), param_groups_.size()));
  }
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> new_options;
  std::vector<std::pair<void*, std::unique_ptr<ParameterState>>> new_states;
  auto new_file =
      in_file_ ? std::make_unique<StateInFile>(in_file_->file(), state_multiple(), in_file_->calls()) : nullptr;
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
            copy_of_state(states.get<StateDict>(key), parameters[i], *new_options.back(), new_file.get()));
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
  in_file_ = std::move(new_file);
  half_made_.clear();
}

// --- on the device, or in a file. A move makes new tensors for the whole state, scalars too: earlier state_dict()s
// keep the old tensors.

bool FusedOptimizer::keep_state_in(const StatePlacement& place) {
  const auto* file = std::get_if<StateFile>(&place);
  if (file == nullptr) {
    bring_state_back();
    return true;
  }
  if (state_may_leave()) {
    keep_state_in(*file, detail::SpillCalls::real());
  }
  return state_may_leave();
}

StatePlacement FusedOptimizer::state_placement() const {
  return in_file_ ? StatePlacement(in_file_->file()) : StateOnDevice();
}

void FusedOptimizer::keep_state_in(const StateFile& file, detail::SpillCalls& calls) {
  constexpr int64_t kSmallest = int64_t{192} << 10;
  if (file.window.count() < kSmallest || file.window.is_unlimited()) {
    throw ConfigError(fmt::format("{}.keep_state_in: window is {}; give at least {}, and an amount", name(),
                                  file.window.str(), Bytes(kSmallest).str()));
  }
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.is_cpu()) {
        throw ConfigError(
            fmt::format("{}.keep_state_in: {} is on {}; only state of parameters on the CPU goes to a file", name(),
                        describe(parameter), parameter.device().str()));
      }
    }
  }
  const StateFile lasting_file{.directory = detail::lasting(file.directory), .window = file.window};
  auto next = std::make_unique<StateInFile>(lasting_file, state_multiple(), calls);
  std::vector<std::pair<void*, std::unique_ptr<ParameterState>>> moved;
  for (const auto& [key, known] : state_) {
    const auto& state = static_cast<const ParameterState&>(*known);
    auto& to = *moved.emplace_back(key, std::make_unique<ParameterState>(state)).second;
    to.in_file.clear();
    for (auto& [tensor_name, tensor] : to.tensors) {
      tensor = tensor.dim() == 0
                   ? tensor.clone()
                   : at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    }
    next->place(to);
    for (const auto& [tensor_name, place] : to.in_file) {
      next->write(to, tensor_name,
                  in_file_ ? StateInFile::lent(state, tensor_name, in_file_->mapped()) : state.at(tensor_name));
    }
  }
  for (auto& [key, state] : moved) {
    state_[key] = std::move(state);
  }
  in_file_ = std::move(next);
}

void FusedOptimizer::bring_state_back() {
  if (!in_file_) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::vector<std::pair<ParameterState*, ParameterState>> moved;
  for (const auto& [key, known] : state_) {
    auto& state = static_cast<ParameterState&>(*known);
    ParameterState& to = moved.emplace_back(&state, state).second;
    for (auto& [tensor_name, tensor] : to.tensors) {
      tensor = state.in_file.contains(tensor_name) ? in_file_->read(state, tensor_name) : tensor.clone();
    }
    to.in_file.clear();
  }
  for (auto& [state, to] : moved) {
    *state = std::move(to);
  }
  in_file_.reset();
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
  if (file == nullptr || !state_may_leave()) {
    return {};
  }
  const std::vector<ParameterState> states = states_to_be();
  MovableState::PlacementBytes bytes{.moved = 0,
                                     .workspace = StateInFile::workspace_bytes(states, *file, state_multiple())};
  for (const ParameterState& state : states) {
    if (!state.device.is_cpu()) {
      return {};
    }
    for (const auto& [tensor_name, tensor] : state.tensors) {
      bytes.moved += tensor.dim() > 0 ? static_cast<int64_t>(tensor.nbytes()) : 0;
    }
  }
  return bytes;
}

void FusedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  detail::write_state(archive, state_dict());
}

void FusedOptimizer::load(torch::serialize::InputArchive& archive) { load_state_dict(detail::read_state(archive)); }

}  // namespace snug
