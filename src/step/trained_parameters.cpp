// Which parameters a step trains
//
// Programs freeze, unfreeze, replace and add parameters between steps, and torch reports no such change. Many objects
// need the set of trained parameters: the window checks writes, the scaler names parameters, plans count gradients,
// ranks compare fingerprints. If each object asked model and optimizer itself, two answers in one step might differ. So
// refresh() decides once, at the opening of a step. Names are made again only after a change, because names take longer
// than the rest of a step's bookkeeping. A parameter that is frozen or unfrozen later in the step is refused
// (check_unchanged), because the gradient would belong to a part of the step.
//
// A 16-bit weight rounds away updates smaller than half its resolution. So masters take the place of 16-bit weights in
// the optimizer (exchange), and the optimizer need not know of masters. Consequences: gradients accumulate on masters,
// the optimizer state moves from weight to master and, at the end, back; an optimizer that updates 16-bit weights
// itself is refused.

#include "src/step/trained_parameters.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "snug/core.h"
#include "src/core/allocated_bytes.h"
#include "src/core/fnv1a.h"
#include "src/core/optimizer_capabilities.h"
#include "src/memory/weight_window.h"
#include "src/precision/low_precision.h"

namespace snug::detail {
TrainedParameters::TrainedParameters(torch::nn::Module& model, torch::optim::Optimizer& optimizer)
    : model_(model), optimizer_(optimizer) {
  if (needs_closure(optimizer)) {
    throw ConfigError(
        "Stepper: LBFGS computes the loss several times in an update, by a closure, and a Stepper makes one update of "
        "one gradient; call optimizer.step(closure) in a loop of your own, with an AccumulationWindow in the closure "
        "for micro-batches, or take another optimizer");
  }
  if (auto* loose = dynamic_cast<LooseParameters*>(&model)) {
    loose->follow({});
  }
  std::unordered_set<const void*> own;
  for (const at::Tensor& parameter : model.parameters()) {
    own.insert(parameter.unsafeGetTensorImpl());
  }
  refresh();
  if (std::ranges::none_of(updated(), [&](const auto& one) { return own.contains(one.unsafeGetTensorImpl()); })) {
    throw ConfigError("Stepper: the optimizer holds none of the model's parameters; was it made for another model?");
  }
}

// A sharded optimizer has the state elsewhere, and cannot take other parameters after a step.
TrainedParameters::~TrainedParameters() {
  if (!masters_) {
    return;
  }
  for (torch::optim::Optimizer* one : optimizers_in(optimizer_)) {
    try {
      if (!one->state().empty() || state_tensors(*one).empty()) {
        exchange(*one, masters_->parameters(), masters_->low());
      }
    } catch (...) {  // the masters stay
    }
  }
}

void LooseParameters::follow(const std::vector<at::Tensor>& held) {
  std::unordered_set<const void*> are_held;
  for (const at::Tensor& parameter : held) {
    are_held.insert(parameter.unsafeGetTensorImpl());
  }
  std::erase_if(never_held_,
                [&](const at::Tensor& parameter) { return are_held.contains(parameter.unsafeGetTensorImpl()); });
  parameters_.clear();
  for (const auto* const parameters : {&held, &std::as_const(never_held_)}) {
    for (const at::Tensor& parameter : *parameters) {
      parameters_.insert(std::to_string(parameters_.size()), parameter);
    }
  }
}

bool TrainedParameters::refresh() {
  take_groups(optimizer_);
  if (auto* loose = dynamic_cast<LooseParameters*>(&model_)) {
    loose->follow(updated());
  }
  for (size_t i = 0; masters_ && i < masters_->low().size(); ++i) {
    masters_->parameters()[i].set_requires_grad(masters_->low()[i].requires_grad());
  }
  std::vector<Seen> now = look();
  if (now == seen_) {
    return false;
  }
  seen_.clear();  // if naming throws, the next refresh must throw too
  name_all();
  seen_ = std::move(now);
  held_.clear();
  for (const Seen& seen : seen_) {
    held_.insert(seen.parameter.unsafeGetTensorImpl());
  }
  return true;
}

void TrainedParameters::drop_gradients() {
  for (const Seen& seen : seen_) {
    if (seen.parameter.grad().defined()) {
      seen.parameter.mutable_grad().reset();
    }
  }
}

void TrainedParameters::check_unchanged() const {
  for (const Seen& seen : seen_) {
    if (seen.parameter.requires_grad() != seen.requires_grad) {
      throw ConfigError(
          fmt::format("Stepper: parameter '{}' was {} inside the accumulation window; its gradient would be that of a "
                      "part of the step. Freeze and unfreeze only between windows, not in loss_of",
                      name_of(seen.parameter), seen.requires_grad ? "frozen" : "unfrozen"));
    }
  }
}

// The parameters of model, masters and optimizer, without names, in an order that stays the same.
std::vector<TrainedParameters::Seen> TrainedParameters::look() const {
  std::vector<Seen> now;
  now.reserve(seen_.size());
  const auto add = [&](const std::vector<at::Tensor>& parameters) {
    for (const at::Tensor& parameter : parameters) {
      now.push_back({parameter, parameter.requires_grad(), parameter.device()});
    }
  };
  model_.apply([&](torch::nn::Module& module) { add(module.parameters(/*recurse=*/false)); });
  if (masters_) {
    add(masters_->parameters());
  }
  add(updated());
  return now;
}

void TrainedParameters::name_all() {
  all_.clear();
  accumulated_.clear();
  leaves_.clear();
  std::unordered_set<const void*> seen;
  const auto add = [&](std::string name, const at::Tensor& parameter, bool is_master = false) {
    if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second) {
      if (!is_master) {
        leaves_.emplace_back(parameter, accumulated_for(parameter));
      }
      if (!masters_ || !is_low(parameter)) {
        accumulated_.emplace_back(name, parameter);
      }
      all_.emplace_back(std::move(name), parameter);
    }
  };
  for (const auto& entry : model_.named_parameters()) {
    add(entry.key(), entry.value());
  }
  if (all_.empty()) {
    throw ConfigError("Stepper: the model has no parameters to train");
  }
  for (size_t i = 0; masters_ && i < masters_->low().size(); ++i) {
    add(name_of(masters_->low()[i]) + " (master)", masters_->parameters()[i], /*is_master=*/true);
  }
  size_t index = 0;
  for (const at::Tensor& parameter : updated()) {
    add(fmt::format("{} of the optimizer", index++), parameter);
  }
  capabilities_of(optimizer_).update.name_parameters(all_);
  fingerprint_ = detail::fnv1a("");
  for (const auto& [name, parameter] : all_) {
    fingerprint_ = detail::fnv1a("\n", detail::fnv1a(name, fingerprint_));
    if (parameter.device() != device()) {
      throw ConfigError(fmt::format(
          "Stepper: parameters '{}' and '{}' are on different devices, {} and {}; use one process per device",
          all_.front().first, name, device().str(), parameter.device().str()));
    }
  }
}

std::string TrainedParameters::name_of(const at::Tensor& parameter) const {
  const auto entry = std::find_if(all_.begin(), all_.end(), [&](const auto& e) { return e.second.is_same(parameter); });
  if (entry != all_.end()) {
    return entry->first;
  }
  for (const auto& frozen : model_.named_parameters()) {
    if (frozen.value().is_same(parameter)) {
      return frozen.key();
    }
  }
  return "a frozen parameter of the optimizer";
}

std::vector<at::Tensor> TrainedParameters::updated() const {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer_.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
}

TrainedParameters::NamedTensors TrainedParameters::updated_by_name() const {
  std::unordered_set<const void*> missing;
  for (const at::Tensor& parameter : updated()) {
    missing.insert(parameter.unsafeGetTensorImpl());
  }
  NamedTensors named;
  for (const auto& [name, parameter] : all_) {
    const at::Tensor& written = accumulated_for(parameter);
    if (missing.erase(written.unsafeGetTensorImpl()) > 0) {
      named.emplace_back(name, written);
    }
  }
  return named;
}

const at::Tensor& TrainedParameters::accumulated_for(const at::Tensor& parameter) const {
  const auto master = master_of_.find(parameter.unsafeGetTensorImpl());
  return master != master_of_.end() ? master->second : parameter;
}

int64_t TrainedParameters::gradient_bytes() const {
  AllocatedBytes bytes;
  for (const auto& [name, parameter] : all_) {
    bytes.add(parameter.grad());
  }
  return bytes.count();
}

int64_t TrainedParameters::bytes_of_all_gradients() const {
  int64_t bytes = 0;
  for (const auto& [name, parameter] : accumulated_) {
    bytes += allocated_bytes(parameter);
  }
  return bytes;
}

void TrainedParameters::hold_zero_gradients() {
  for (const auto& [name, parameter] : accumulated_) {
    if (!parameter.grad().defined()) {
      parameter.mutable_grad() = at::zeros_like(parameter);
    }
  }
}

// Whether the optimizer that holds the parameter, or else every optimizer, updates the parameter's type.
bool TrainedParameters::is_taken(const at::Tensor& parameter) const {
  const auto takes = [&](torch::optim::Optimizer* one) {
    return capabilities_of(*one).update.takes(parameter.scalar_type());
  };
  const auto holds = [&](torch::optim::Optimizer* one) {
    return std::ranges::any_of(one->param_groups(), [&](const auto& group) {
      return std::ranges::any_of(group.params(), [&](const auto& held) { return held.is_same(parameter); });
    });
  };
  const auto optimizers = optimizers_in(optimizer_);
  return std::ranges::all_of(optimizers, takes) ||
         std::ranges::any_of(optimizers, [&](auto* one) { return takes(one) && holds(one); });
}

void TrainedParameters::check_full_weights(bool is_scaled) const {
  for (const auto& [name, parameter] : all_) {
    if (is_scaled && parameter.scalar_type() == at::kHalf) {
      throw ConfigError(
          fmt::format("Stepper: parameter '{}' is Half, whose gradients cannot be unscaled without underflow; give "
                      "weights = Weights::Low, which gathers them to FP32",
                      name));
    }
    if (is_low(parameter) && !is_taken(parameter)) {
      throw ConfigError(
          fmt::format("Stepper: parameter '{}' is {}, where updates smaller than half its resolution are rounded away; "
                      "give weights = Weights::Low, or keep the model in FP32 and let precision cast it",
                      name, c10::toString(parameter.scalar_type())));
    }
  }
}

void TrainedParameters::make_masters(Precision precision) {
  if (precision == Precision::Float32) {
    throw ConfigError(
        "Stepper: weights = Low goes with precision BFloat16 or Float16, which says of what type they are");
  }
  const auto dtype = compute_dtype(precision);
  bool any_low = false;
  for (const auto& entry : model_.named_parameters()) {
    any_low = any_low || is_low(entry.value());
    if (is_low(entry.value()) && entry.value().scalar_type() != dtype) {
      throw ConfigError(
          fmt::format("Stepper: parameter '{}' is {}, but precision is {}; convert the model to the same type",
                      entry.key(), c10::toString(entry.value().scalar_type()), to_string(precision)));
    }
  }
  if (!any_low) {
    throw ConfigError(fmt::format(
        "Stepper: weights = Low, but the model's parameters are not 16-bit; convert it by to({}) before its "
        "optimizer is made",
        c10::toString(dtype)));
  }
  if (std::ranges::any_of(optimizers_in(optimizer_),
                          [&](auto* one) { return capabilities_of(*one).update.takes(dtype); })) {
    throw ConfigError(fmt::format(
        "Stepper: weights = Low gives the optimizer FP32 masters to update, so its own cure for {} parameters, such as "
        "AdamW's master_weights or stochastic_rounding, would have no effect; make it without",
        c10::toString(dtype)));
  }
  for (const at::Tensor& state : state_tensors(optimizer_)) {
    if (state.defined() && is_low(state)) {
      throw ConfigError("Stepper: the optimizer has stepped before, on other weights than the masters; make a new one");
    }
  }
  masters_.emplace(model_.parameters());
  for (size_t i = 0; i < masters_->low().size(); ++i) {
    master_of_.emplace(masters_->low()[i].unsafeGetTensorImpl(), masters_->parameters()[i]);
  }
  for (torch::optim::Optimizer* one : optimizers_in(optimizer_)) {
    exchange(*one, masters_->low(), masters_->parameters());
  }
  refresh();
}

// Works on the optimizer. The optimizer's state of a parameter moves to the parameter in its place.
void TrainedParameters::exchange(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& from,
                                 const std::vector<at::Tensor>& to) {
  std::unordered_map<const void*, at::Tensor> in_place_of;
  for (size_t i = 0; i < from.size(); ++i) {
    in_place_of.emplace(from[i].unsafeGetTensorImpl(), to[i]);
  }
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) {
      void* const key = parameter.unsafeGetTensorImpl();
      const auto found = in_place_of.find(key);
      if (found == in_place_of.end() || found->second.is_same(parameter)) {
        continue;
      }
      parameter = found->second;
      if (const auto state = optimizer.state().find(key); state != optimizer.state().end()) {
        auto moved = std::move(state->second);
        optimizer.state().erase(state);
        optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(moved);
      }
    }
  }
}

void TrainedParameters::gather_gradients() {
  if (masters_) {
    masters_->gather_gradients();
  }
}

// Weights at home are written there, one after the other, after late updates of their masters.
void TrainedParameters::scatter() {
  if (!masters_ || !WeightWindow::exists()) {
    return masters_ ? masters_->scatter() : void();
  }
  const at::NoGradGuard no_grad;
  const auto where_it_is = [](const at::Tensor& weight) {
    const at::Tensor at_home = values_at_home(weight);
    return at_home.defined() ? at_home : weight;
  };
  for (size_t i = 0; i < masters_->low().size(); ++i) {
    if (const at::Tensor& low = masters_->low()[i]; is_low(low)) {
      const at::Tensor& master = masters_->parameters()[i];
      const auto copy = [low, master, where_it_is] { where_it_is(low).copy_(where_it_is(master)); };
      has_late_writes(master.storage()) && values_at_home(low).defined() ? late_.add({low, master}, copy) : copy();
      low.unsafeGetTensorImpl()->bump_version();
    }
  }
}

std::map<std::string, at::Tensor> TrainedParameters::full_precision() const {
  std::map<std::string, at::Tensor> parameters;
  for (const auto& entry : model_.named_parameters()) {
    parameters.emplace(entry.key(), accumulated_for(entry.value()));
  }
  return parameters;
}

void TrainedParameters::load_masters(const StateDict& saved) {
  const at::NoGradGuard no_grad;
  const auto masters = full_precision();
  for (const auto& [name, master] : masters) {
    if (const auto& value = saved.get<at::Tensor>(name); value.sizes() != master.sizes()) {
      throw CorruptFile(fmt::format("Stepper.load_state_dict: the master of '{}' has shape [{}], the parameter [{}]",
                                    name, fmt::join(value.sizes(), ", "), fmt::join(master.sizes(), ", ")));
    }
  }
  for (const auto& [name, master] : masters) {
    at::Tensor(master).copy_(saved.get<at::Tensor>(name));
  }
  scatter();
}

}  // namespace snug::detail
