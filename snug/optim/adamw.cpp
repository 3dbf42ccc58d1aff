#include "snug/optim/adamw.h"

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include "snug/core/error.h"
#include "snug/precision/autocast.h"

namespace snug {
namespace {

using GroupOptions = torch::optim::AdamWOptions;

// The kernel wants the step count as an FP32 scalar on the parameter's device, so that a skip needs no host.
struct FusedState : public torch::optim::OptimizerCloneableParamState<FusedState> {
  at::Tensor step;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;

  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", step, /*is_buffer=*/true);
    archive.write("exp_avg", exp_avg, true);
    archive.write("exp_avg_sq", exp_avg_sq, true);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    archive.read("step", step, /*is_buffer=*/true);
    archive.read("exp_avg", exp_avg, true);
    archive.read("exp_avg_sq", exp_avg_sq, true);
  }
};

std::unique_ptr<FusedState> make_state(const at::Tensor& parameter) {
  auto state = std::make_unique<FusedState>();
  state->step = at::zeros({}, parameter.options().dtype(at::kFloat));
  state->exp_avg = at::zeros_like(parameter, at::MemoryFormat::Preserve);
  state->exp_avg_sq = at::zeros_like(parameter, at::MemoryFormat::Preserve);
  return state;
}

void check_option(bool good, std::string_view name, double value, std::string_view range) {
  if (!good) {
    throw ConfigError(fmt::format("AdamW: {} is {}; it must be {}", name, value, range));
  }
}

void check_options(const GroupOptions& o) {
  const auto [beta1, beta2] = o.betas();
  check_option(o.lr() >= 0 && std::isfinite(o.lr()), "lr", o.lr(), "finite and >= 0");
  check_option(beta1 >= 0 && beta1 < 1, "beta1", beta1, "in [0, 1)");
  check_option(beta2 >= 0 && beta2 < 1, "beta2", beta2, "in [0, 1)");
  check_option(o.eps() >= 0 && std::isfinite(o.eps()), "eps", o.eps(), "finite and >= 0");
  check_option(o.weight_decay() >= 0 && std::isfinite(o.weight_decay()), "weight_decay", o.weight_decay(),
               "finite and >= 0");
  if (o.amsgrad()) {
    throw ConfigError("AdamW: amsgrad is not offered; use torch::optim::AdamW for it");
  }
}

// torch's base class drops options of another optimizer without a word.
const GroupOptions& options_of(const torch::optim::OptimizerParamGroup& group) {
  const auto* options = dynamic_cast<const GroupOptions*>(&group.options());
  if (options == nullptr) {
    throw ConfigError("AdamW: a parameter group has the options of another optimizer; give torch::optim::AdamWOptions");
  }
  return *options;
}

const GroupOptions& checked_options(const torch::optim::OptimizerParamGroup& group) {
  check_options(options_of(group));
  return options_of(group);
}

void check_parameter(const at::Tensor& parameter, size_t index) {
  if (parameter.scalar_type() != at::kFloat && parameter.scalar_type() != at::kDouble) {
    throw ConfigError(fmt::format(
        "AdamW: parameter {} of shape [{}] is {}; only FP32 and FP64 can be updated without losing small steps to "
        "rounding. Keep the model in FP32 and compute in 16 bits under Autocast",
        index, fmt::join(parameter.sizes(), ", "), c10::toString(parameter.scalar_type())));
  }
  if (!parameter.is_non_overlapping_and_dense()) {
    throw ConfigError(
        fmt::format("AdamW: parameter {} of shape [{}] is a view with gaps, which the kernel would write over; make it "
                    "contiguous()",
                    index, fmt::join(parameter.sizes(), ", ")));
  }
}

// parameters() of a model names those of a shared module once for each use.
std::vector<at::Tensor> without_repeats(std::vector<at::Tensor> parameters) {
  std::unordered_set<const void*> seen;
  std::erase_if(parameters, [&](const at::Tensor& p) { return !seen.insert(p.unsafeGetTensorImpl()).second; });
  return parameters;
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.strides() == b.strides() || (a.is_contiguous() && b.is_contiguous());
}

// The kernel walks the memory of all tensors alike, so a gradient must lie in memory as its parameter does.
at::Tensor in_layout_of(const at::Tensor& parameter, const at::Tensor& gradient) {
  return same_layout(parameter, gradient) ? gradient : at::empty_like(parameter).copy_(gradient);
}

// The kernel takes this for granted. A gradient is any tensor that somebody put there; a model may be converted at any time.
void check_fits(std::string_view what, const at::Tensor& tensor, const at::Tensor& parameter, size_t index) {
  if (tensor.sizes() != parameter.sizes() || tensor.scalar_type() != parameter.scalar_type() ||
      tensor.device() != parameter.device()) {
    const auto kind = [](const at::Tensor& t) {
      return fmt::format("{} of shape [{}] on {}", c10::toString(t.scalar_type()), fmt::join(t.sizes(), ", "),
                         t.device().str());
    };
    throw ConfigError(
        fmt::format("AdamW.step: the {} of parameter {} is {}, the parameter {}; convert or move a model before its "
                    "optimizer is made",
                    what, index, kind(tensor), kind(parameter)));
  }
}

void check_gradient(const at::Tensor& gradient, const at::Tensor& parameter, size_t index) {
  if (gradient.is_sparse()) {
    throw ConfigError("AdamW.step: sparse gradients are not supported; build the embedding with sparse(false)");
  }
  check_fits("gradient", gradient, parameter, index);
}

void check_state(const FusedState& state, const at::Tensor& parameter, size_t index) {
  check_fits("state", state.exp_avg, parameter, index);
  if (!same_layout(state.exp_avg, parameter)) {
    throw ConfigError(fmt::format(
        "AdamW.step: parameter {} has changed its memory layout since the last step; change it before its optimizer is "
        "made",
        index));
  }
}

GroupOptions to_group_options(const AdamWOptions& o) {
  return GroupOptions(o.lr).betas({o.beta1, o.beta2}).eps(o.eps).weight_decay(o.weight_decay);
}

at::Tensor on_device(const at::Tensor& scalar, c10::Device device) {
  return scalar.defined() ? scalar.to(device, /*non_blocking=*/true) : scalar;
}

// One call of the kernel: tensors of one group, device and dtype. prepare() allocates, run() only writes.
struct Batch {
  const GroupOptions* options = nullptr;
  std::vector<FusedState*> states;
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs;
  std::vector<at::Tensor> steps;        // with this step counted, for the kernel
  std::vector<at::Tensor> steps_after;  // without it where the kernel skips
  at::Tensor grad_scale, found_inf;

  void prepare(const at::Tensor& scale, const at::Tensor& found) {
    const c10::Device device = parameters.front().device();
    grad_scale = on_device(scale, device);
    found_inf = on_device(found, device);
    std::vector<at::Tensor> now;
    for (const FusedState* state : states) {
      now.push_back(state->step);
      exp_avgs.push_back(state->exp_avg);
      exp_avg_sqs.push_back(state->exp_avg_sq);
    }
    steps = at::_foreach_add(now, 1);
    steps_after =
        found_inf.defined() ? at::_foreach_sub(steps, std::vector<at::Tensor>(steps.size(), found_inf)) : steps;
  }

  void run() {
    const auto optional = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
    const auto [beta1, beta2] = options->betas();
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = gradients[i];  // the kernel unscales it in place
    }
    at::_fused_adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, steps, options->lr(), beta1,
                      beta2, options->weight_decay(), options->eps(), /*amsgrad=*/false, /*maximize=*/false,
                      optional(grad_scale), optional(found_inf));
    for (size_t i = 0; i < states.size(); ++i) {
      states[i]->step = steps_after[i];
      parameters[i].unsafeGetTensorImpl()->bump_version();  // the kernel does not, and autograd could not see the write
    }
  }
};

}  // namespace

AdamW::AdamW(std::vector<at::Tensor> parameters, AdamWOptions options)
    : AdamW(std::vector{torch::optim::OptimizerParamGroup(without_repeats(std::move(parameters)))}, options) {}

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, AdamWOptions options)
    : torch::optim::Optimizer(groups, std::make_unique<GroupOptions>(to_group_options(options))) {
  for (const auto& group : groups) {
    if (group.has_options()) {
      checked_options(group);
    }
  }
  size_t index = 0;
  std::unordered_set<const void*> seen;
  for (auto& group : param_groups()) {
    checked_options(group);
    for (const at::Tensor& parameter : group.params()) {
      check_parameter(parameter, index);
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
        throw ConfigError(fmt::format("AdamW: parameter {} is in the groups twice; give each once", index));
      }
      ++index;
    }
  }
  if (index == 0) {
    throw ConfigError("AdamW: there are no parameters; was the model built before the optimizer?");
  }
}

void AdamW::set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) {
  grad_scale_ = std::move(grad_scale);
  found_inf_ = std::move(found_inf);
}

at::Tensor AdamW::step(LossClosure closure) {
  const at::Tensor grad_scale = std::exchange(grad_scale_, {});
  const at::Tensor found_inf = std::exchange(found_inf_, {});
  if (closure && found_inf.defined()) {
    throw ConfigError("AdamW.step: a closure cannot be used with a GradScaler; call backward() before the step");
  }
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  std::vector<std::pair<void*, std::unique_ptr<FusedState>>> new_states;
  std::vector<Batch> batches;
  size_t index = 0;
  for (auto& group : param_groups()) {
    const auto& options = checked_options(group);
    std::map<std::pair<std::string, c10::ScalarType>, Batch> by_kind;
    for (const at::Tensor& parameter : group.params()) {
      const size_t i = index++;
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined()) {
        continue;
      }
      check_parameter(parameter, i);
      check_gradient(gradient, parameter, i);
      void* key = parameter.unsafeGetTensorImpl();
      const auto known = state_.find(key);
      FusedState* state = known == state_.end() ? nullptr : static_cast<FusedState*>(known->second.get());
      if (state == nullptr) {
        new_states.emplace_back(key, make_state(parameter));
        state = new_states.back().second.get();
      }
      check_state(*state, parameter, i);
      Batch& batch = by_kind[{parameter.device().str(), parameter.scalar_type()}];
      batch.options = &options;
      batch.parameters.push_back(parameter);
      batch.gradients.push_back(in_layout_of(parameter, gradient));
      batch.states.push_back(state);
    }
    for (auto& entry : by_kind) {
      batches.push_back(std::move(entry.second));
      batches.back().prepare(grad_scale, found_inf);
    }
  }
  for (auto& [key, state] : new_states) {
    state_[key] = std::move(state);
  }
  for (Batch& batch : batches) {
    batch.run();
  }
  clear_autocast_cache();
  return loss;
}

StateDict AdamW::state_dict() const {
  StateDict states;
  StateDict groups;
  size_t index = 0;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& group = param_groups_[g];
    const auto& o = options_of(group);
    StateDict options;
    options.set("lr", o.lr());
    options.set("beta1", std::get<0>(o.betas()));
    options.set("beta2", std::get<1>(o.betas()));
    options.set("eps", o.eps());
    options.set("weight_decay", o.weight_decay());
    options.set("parameters", static_cast<int64_t>(group.params().size()));
    groups.set(std::to_string(g), std::move(options));
    for (const at::Tensor& parameter : group.params()) {
      if (const auto known = state_.find(parameter.unsafeGetTensorImpl()); known != state_.end()) {
        const auto& state = static_cast<const FusedState&>(*known->second);
        StateDict entry;
        entry.set("step", state.step);
        entry.set("exp_avg", state.exp_avg);
        entry.set("exp_avg_sq", state.exp_avg_sq);
        states.set(std::to_string(index), std::move(entry));
      }
      ++index;
    }
  }
  StateDict result;
  result.set("state", std::move(states));
  result.set("param_groups", std::move(groups));
  return result;
}

namespace {

at::Tensor copy_like(const StateDict& entry, const std::string& name, const at::Tensor& model, size_t index) {
  const auto& saved = entry.get<at::Tensor>(name);
  if (!saved.defined() || saved.sizes() != model.sizes()) {
    throw CorruptFile(fmt::format(
        "AdamW.load_state_dict: {} of parameter {} {}, it should have [{}]; was this state saved for another model?",
        name, index,
        saved.defined() ? fmt::format("has shape [{}]", fmt::join(saved.sizes(), ", ")) : "is an undefined tensor",
        fmt::join(model.sizes(), ", ")));
  }
  return at::empty_like(model).copy_(saved);
}

std::unique_ptr<FusedState> copy_of_state(const StateDict& entry, const at::Tensor& parameter, size_t index) {
  auto state = make_state(parameter);
  state->step = copy_like(entry, "step", state->step, index);
  state->exp_avg = copy_like(entry, "exp_avg", parameter, index);
  state->exp_avg_sq = copy_like(entry, "exp_avg_sq", parameter, index);
  return state;
}

GroupOptions group_options_from(const StateDict& saved) {
  GroupOptions options = to_group_options({.lr = saved.get<double>("lr"),
                                           .beta1 = saved.get<double>("beta1"),
                                           .beta2 = saved.get<double>("beta2"),
                                           .eps = saved.get<double>("eps"),
                                           .weight_decay = saved.get<double>("weight_decay")});
  check_options(options);
  return options;
}

}  // namespace

void AdamW::load_state_dict(const StateDict& dict) {
  const at::NoGradGuard no_grad;
  const auto& states = dict.get<StateDict>("state");
  const auto& groups = dict.get<StateDict>("param_groups");
  if (groups.size() != param_groups_.size()) {
    throw CorruptFile(fmt::format("AdamW.load_state_dict: the state has {} parameter groups, this optimizer {}",
                                  groups.size(), param_groups_.size()));
  }
  std::vector<GroupOptions> new_options;
  std::vector<std::pair<void*, std::unique_ptr<FusedState>>> new_states;
  size_t index = 0;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& saved = groups.get<StateDict>(std::to_string(g));
    const auto& parameters = param_groups_[g].params();
    options_of(param_groups_[g]);
    if (saved.get<int64_t>("parameters") != static_cast<int64_t>(parameters.size())) {
      throw CorruptFile(
          fmt::format("AdamW.load_state_dict: group {} of the state has {} parameters, this optimizer's {}", g,
                      saved.get<int64_t>("parameters"), parameters.size()));
    }
    new_options.push_back(group_options_from(saved));
    for (const at::Tensor& parameter : parameters) {
      if (const std::string key = std::to_string(index); states.contains(key)) {
        new_states.emplace_back(parameter.unsafeGetTensorImpl(),
                                copy_of_state(states.get<StateDict>(key), parameter, index));
      }
      ++index;
    }
  }
  if (new_states.size() != states.size()) {
    throw CorruptFile(
        fmt::format("AdamW.load_state_dict: the state is of {} parameters, of which this optimizer has {}",
                    states.size(), new_states.size()));
  }
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    static_cast<GroupOptions&>(param_groups_[g].options()) = new_options[g];  // made sure of above
  }
  state_.clear();
  for (auto& [key, state] : new_states) {
    state_[key] = std::move(state);
  }
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<FusedState, GroupOptions>(archive, *this);
}

// torch's function writes as it reads, checks no shapes and keeps the state that the archive has none for. So it reads into another
// optimizer of the same groups, whose state is then checked and taken whole.
void AdamW::load(torch::serialize::InputArchive& archive) {
  AdamW saved(param_groups_);
  torch::optim::serialize<FusedState, GroupOptions>(archive, static_cast<torch::optim::Optimizer&>(saved));
  for (const auto& group : saved.param_groups_) {
    checked_options(group);
  }
  load_state_dict(saved.state_dict());
}

}  // namespace snug
