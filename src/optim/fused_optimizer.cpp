#include "snug/fused_optimizer.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <fmt/ranges.h>

#include "snug/autocast.h"
#include "snug/core.h"
#include "src/core/allocated_bytes.h"
#include "src/core/lazy_values.h"
#include "src/optim/state_in_file.h"
#include "src/precision/low_precision.h"

namespace snug {
namespace {

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.strides() == b.strides() || (a.is_contiguous() && b.is_contiguous());
}

// Kernels go through the memory of all tensors in the same order, so a gradient must have the memory layout of the
// parameter.
at::Tensor in_layout_of(const at::Tensor& parameter, const at::Tensor& gradient) {
  const bool is_there = same_layout(parameter, gradient) && !detail::is_lazy(gradient);
  return is_there ? gradient : at::empty_like(parameter).copy_(gradient);
}

std::string kind_of(const at::Tensor& t, c10::Device device) {
  return fmt::format("{} of shape [{}] on {}", c10::toString(t.scalar_type()), fmt::join(t.sizes(), ", "),
                     device.str());
}

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

at::Tensor on_device(const at::Tensor& scalar, c10::Device device) {
  return scalar.defined() ? scalar.to(device, /*non_blocking=*/true) : scalar;
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

// The complete work of a step, prepared before any part of the work is done.
struct FusedOptimizer::Update {
  std::vector<std::pair<void*, std::unique_ptr<ParameterState>>> new_states;
  std::vector<Work> works;
  std::vector<std::function<void()>> writes;      // none if the state is in a file
  std::optional<StateInFile::Streamed> streamed;  // the update of a state in a file
  bool is_known_state_larger = false;             // larger than before, in the file
};

FusedOptimizer::FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                               std::unique_ptr<torch::optim::OptimizerOptions> defaults, const OptionRules& rules)
    : torch::optim::Optimizer(with_leaves(groups), std::move(defaults)), rules_(rules) {}

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
  return fmt::format("parameter {}", place_of(parameter).number);
}

FusedOptimizer::Place FusedOptimizer::place_of(const at::Tensor& parameter) const {
  Place place{0, 0};
  for (const auto& group : param_groups_) {
    for (const at::Tensor& p : group.params()) {
      if (p.is_same(parameter)) {
        return place;
      }
      ++place.number;
      place.first_element += static_cast<uint64_t>(p.numel());
    }
  }
  return place;
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
    if (!rules_.are_torchs) {
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

// Kernels rely on these properties. Anybody may set any tensor as a gradient, and a model may be converted at any time.
void FusedOptimizer::check_gradient(const at::Tensor& parameter) const {
  const at::Tensor& gradient = parameter.grad();
  if (gradient.is_sparse()) {
    throw ConfigError(fmt::format(
        "{}.step: the gradient of {} is sparse, which is not supported; build the embedding with sparse(false)", name(),
        describe(parameter)));
  }
  if (gradient.sizes() != parameter.sizes() || gradient.scalar_type() != parameter.scalar_type() ||
      gradient.device() != parameter.device()) {
    throw ConfigError(fmt::format(
        "{}.step: the gradient of {} is {}, the parameter {}; convert or move a model before its optimizer "
        "is made",
        name(), describe(parameter), kind_of(gradient, gradient.device()), kind_of(parameter, parameter.device())));
  }
}

void FusedOptimizer::check_state(const ParameterState& state, const at::Tensor& parameter) const {
  if (state.made_for.sizes() != parameter.sizes() || state.made_for.scalar_type() != parameter.scalar_type() ||
      state.device != parameter.device()) {
    throw ConfigError(fmt::format(
        "{}.step: the state of {} is for {}, the parameter is {}; convert or move a model before its "
        "optimizer is made",
        name(), describe(parameter), kind_of(state.made_for, state.device), kind_of(parameter, parameter.device())));
  }
  if (!same_layout(state.made_for, parameter)) {
    throw ConfigError(fmt::format(
        "{}.step: {} has changed its memory layout since the last step; change it before its optimizer is made", name(),
        describe(parameter)));
  }
}

// --- the step

void FusedOptimizer::set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) {
  grad_scale_ = std::move(grad_scale);
  found_inf_ = std::move(found_inf);
}

bool FusedOptimizer::before_writing(std::function<void()> hook) {
  before_writing_ = std::move(hook);
  return true;
}

at::Tensor FusedOptimizer::step(LossClosure closure) {
  const at::Tensor grad_scale = std::exchange(grad_scale_, {});
  const at::Tensor found_inf = std::exchange(found_inf_, {});
  const auto before_writing = std::exchange(before_writing_, {});
  if (closure && found_inf.defined()) {
    throw ConfigError(
        fmt::format("{}.step: a closure cannot be used with a GradScaler; call backward() before the step", name()));
  }
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const auto collect_all = [&](Update& update) {
    uint64_t first_element = 0;
    for (const auto& group : param_groups_) {
      collect(update, group, group.params(), first_element, grad_scale, found_inf);
      for (const at::Tensor& parameter : group.params()) {
        first_element += static_cast<uint64_t>(parameter.numel());
      }
    }
  };
  make_update(collect_all, before_writing);
  return loss;
}

void FusedOptimizer::make_update(const std::function<void(Update&)>& collect_all,
                                 const std::function<void()>& before_writing) {
  if (!half_made_.empty()) {
    throw Error(
        fmt::format("{}.step: an earlier step has stopped midway: {}; go on from a snapshot of model and optimizer",
                    name(), half_made_));
  }
  const at::NoGradGuard no_grad;
  Update update;
  const int64_t end = in_file_ ? in_file_->end() : 0;
  auto give_places_back = c10::make_scope_exit([&] {
    if (in_file_ && !update.is_known_state_larger) {
      in_file_->set_end(end);
    }
  });
  collect_all(update);
  if (in_file_) {
    update.streamed =
        in_file_->stream(update.works, [this](const Work& work) { return prepare(work); }, copied_state());
  } else {
    for (const Work& work : update.works) {
      update.writes.push_back(prepare(work));
    }
  }
  if (before_writing) {
    before_writing();
  }
  give_places_back.release();
  commit(update);
}

void FusedOptimizer::step_parameter(const at::Tensor& parameter) {
  for (const auto& group : param_groups_) {
    for (const at::Tensor& p : group.params()) {
      if (p.is_same(parameter)) {
        const auto collect_one = [&](Update& update) {
          collect(update, group, {parameter}, place_of(parameter).first_element, {}, {});
        };
        make_update(collect_one, {});
        return;
      }
    }
  }
  throw ConfigError(fmt::format("{}.step_parameter: this optimizer does not hold the parameter", name()));
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

std::unique_ptr<FusedOptimizer::ParameterState> FusedOptimizer::first_state(
    const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) const {
  auto state = std::make_unique<ParameterState>();
  if (in_file_) {
    *state = state_without_memory(parameter, options);
    in_file_->place(*state);
    if (const auto copied = copied_state(); copied && state->contains(*copied) && parameter.dim() == 0) {
      state->at(*copied).copy_(parameter);  // scalars stay in memory
    }
  } else {
    state->made_for = at::empty_like(parameter, parameter.options().device(at::kMeta));
    state->device = parameter.device();
    make_state(*state, parameter, options);
  }
  return state;
}

// An option that needs more state may have been set since.
void FusedOptimizer::place_new_tensors(ParameterState& state, const at::Tensor& parameter,
                                       const torch::optim::OptimizerOptions& options) {
  for (auto& [tensor_name, tensor] : state_without_memory(parameter, options).tensors) {
    if (!state.contains(tensor_name)) {
      state.tensors.emplace_back(tensor_name, tensor);
      state.is_fresh = true;
    }
  }
  in_file_->place(state);
}

int64_t FusedOptimizer::state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& gets_gradient) const {
  int64_t bytes = 0;
  for (const auto& group : param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (state_.count(parameter.unsafeGetTensorImpl()) == 0 && gets_gradient(parameter)) {
        for (const auto& [tensor_name, tensor] : state_without_memory(parameter, group.options()).tensors) {
          const bool is_in_file = in_file_ && tensor.dim() > 0;
          bytes += is_in_file ? 0 : detail::allocated_bytes(static_cast<int64_t>(tensor.nbytes()), parameter.device());
        }
      }
    }
  }
  return bytes;
}

void FusedOptimizer::collect(Update& update, const torch::optim::OptimizerParamGroup& group, at::TensorList parameters,
                             uint64_t first_element, const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  const auto& options = group.options();
  check_options(options);
  std::map<std::pair<std::string, at::ScalarType>, Work> by_kind;
  for (const at::Tensor& parameter : parameters) {
    const uint64_t first = std::exchange(first_element, first_element + static_cast<uint64_t>(parameter.numel()));
    if (!parameter.grad().defined()) {
      continue;
    }
    check_type(parameter);
    check_parameter(parameter);
    check_gradient(parameter);
    void* key = parameter.unsafeGetTensorImpl();
    const auto known = state_.find(key);
    auto* state = known == state_.end() ? nullptr : static_cast<ParameterState*>(known->second.get());
    if (state == nullptr) {
      update.new_states.emplace_back(key, first_state(parameter, options));
      state = update.new_states.back().second.get();
    } else if (in_file_) {
      const int64_t end = in_file_->end();
      place_new_tensors(*state, parameter, options);
      update.is_known_state_larger = update.is_known_state_larger || in_file_->end() > end;
    }
    check_state(*state, parameter);
    Work& work = by_kind[{parameter.device().str(), parameter.scalar_type()}];
    work.parameters.push_back(parameter);
    work.gradients.push_back(in_layout_of(parameter, parameter.grad()));
    work.states.push_back(state);
    const auto elsewhere = first_elements_.find(key);
    work.first_elements.push_back(elsewhere == first_elements_.end() ? first : elsewhere->second);
  }
  for (auto& [kind, work] : by_kind) {
    const c10::Device device = work.parameters.front().device();
    work.options = &options;
    work.grad_scale = on_device(grad_scale, device);
    work.found_inf = on_device(found_inf, device);
    update.works.push_back(std::move(work));
  }
}

void FusedOptimizer::commit(Update& update) {
  for (auto& [key, state] : update.new_states) {
    state_[key] = std::move(state);
  }
  for (const Work& work : update.works) {
    for (size_t i = 0; i < work.parameters.size(); ++i) {
      work.parameters[i].mutable_grad() = work.gradients[i];  // the kernel unscales the gradient in place
    }
  }
  const auto tell_autograd = c10::make_scope_exit([&] {
    for (const Work& work : update.works) {
      for (const at::Tensor& parameter : work.parameters) {
        // Kernels do not bump the version, and autograd must see the write.
        parameter.unsafeGetTensorImpl()->bump_version();
      }
    }
    clear_autocast_cache();
  });
  if (update.streamed) {
    stream(update);
    return;
  }
  for (size_t w = 0; w < update.works.size(); ++w) {
    for (ParameterState* state : update.works[w].states) {
      state->is_fresh = false;
    }
    update.writes[w]();
  }
}

void FusedOptimizer::stream(Update& update) {
  try {
    update.streamed->stream->run();
  } catch (const std::exception& error) {
    half_made_ = error.what();
    throw Error(
        fmt::format("{}.step: it has stopped midway, with some parameters updated: {}; go on from a snapshot of "
                    "model and optimizer",
                    name(), half_made_));
  }
  update.streamed->finish();
}

}  // namespace snug
