// FusedOptimizer's step: collected and prepared, then written.

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <fmt/ranges.h>

#include "snug/autocast.h"
#include "snug/core.h"
#include "src/core/lazy_values.h"
#include "src/memory/weight_window.h"
#include "src/optim/fused_optimizer_parts.h"
#include "src/optim/state_outside.h"

namespace snug {
namespace {

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.strides() == b.strides() || (a.is_contiguous() && b.is_contiguous());
}

// Kernels go through the memory of all tensors in the same order, so a gradient must have the memory layout of the
// parameter.
at::Tensor in_layout_of(const at::Tensor& parameter, const at::Tensor& gradient) {
  const bool is_there = same_layout(parameter, gradient) && !detail::is_lazy(gradient);
  return is_there ? gradient : at::empty_like(parameter, gradient.device()).copy_(gradient);
}

std::string kind_of(const at::Tensor& t, c10::Device device) {
  return fmt::format("{} of shape [{}] on {}", c10::toString(t.scalar_type()), fmt::join(t.sizes(), ", "),
                     device.str());
}

at::Tensor on_device(const at::Tensor& scalar, c10::Device device) {
  return scalar.defined() ? scalar.to(device, /*non_blocking=*/!device.is_cpu()) : scalar;
}

}  // namespace

// The complete work of a step, prepared before any part of the work is done.
class FusedOptimizer::Update {
 public:
  explicit Update(FusedOptimizer& optimizer);
  // Room in the file for states that are not made is given back.
  ~Update();
  Update(const Update&) = delete;
  Update& operator=(const Update&) = delete;

  // Adds those of `parameters`, of `group`, that have gradients.
  void collect(const torch::optim::OptimizerParamGroup& group, at::TensorList parameters, uint64_t first_element,
               const at::Tensor& grad_scale = {}, const at::Tensor& found_inf = {});
  void make(const std::function<void()>& before_writing);

 private:
  void check_gradient(const at::Tensor& parameter) const;
  void check_state(const ParameterState& state, const at::Tensor& parameter) const;
  ParameterState* state_for(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options);
  std::unique_ptr<ParameterState> first_state(const at::Tensor& parameter,
                                              const torch::optim::OptimizerOptions& options) const;
  void place_new_tensors(ParameterState& state, const at::Tensor& parameter,
                         const torch::optim::OptimizerOptions& options) const;
  void commit();
  void stream();

  FusedOptimizer& optimizer_;
  StateOutside* outside_ = nullptr;  // null: the state is on the device
  int64_t file_end_ = 0;             // before the update
  bool keeps_room_ = false;
  std::vector<std::pair<void*, std::unique_ptr<ParameterState>>> new_states_;
  std::vector<Work> works_;
  std::vector<std::function<void()>> writes_;                             // none if the state is outside
  std::optional<StateOutside::Streamed> streamed_;                        // the update of a state outside
  std::vector<std::shared_ptr<torch::optim::OptimizerOptions>> options_;  // of works_
};

// --- collected

FusedOptimizer::Update::Update(FusedOptimizer& optimizer) : optimizer_(optimizer) {
  if (!optimizer_.half_made_.empty()) {
    throw Error(
        fmt::format("{}.step: an earlier step has stopped midway: {}; go on from a snapshot of model and optimizer",
                    optimizer_.name(), optimizer_.half_made_));
  }
  auto& outside = optimizer.outside_;
  if (outside && optimizer.state_.empty() && outside->end() > 0) {  // a new file; state_dict()s show the old file
    outside = std::make_unique<StateOutside>(outside->placement(), optimizer.state_multiple(), outside->calls());
  }
  outside_ = outside.get();
  file_end_ = outside ? outside->end() : 0;
}

FusedOptimizer::Update::~Update() {
  if (outside_ != nullptr && !keeps_room_) {
    outside_->set_end(file_end_);
  }
}

// Kernels rely on these properties. Anybody may set any tensor as a gradient, and a model may be converted at any time.
void FusedOptimizer::Update::check_gradient(const at::Tensor& parameter) const {
  const at::Tensor& gradient = parameter.grad();
  if (gradient.is_sparse()) {
    throw ConfigError(fmt::format(
        "{}.step: the gradient of {} is sparse, which is not supported; build the embedding with sparse(false)",
        optimizer_.name(), optimizer_.describe(parameter)));
  }
  const bool is_there = gradient.device() == parameter.device() || (outside_ != nullptr && gradient.is_cpu());
  if (gradient.sizes() != parameter.sizes() || gradient.scalar_type() != parameter.scalar_type() || !is_there) {
    throw ConfigError(
        fmt::format("{}.step: the gradient of {} is {}, the parameter {}; convert or move a model before its optimizer "
                    "is made",
                    optimizer_.name(), optimizer_.describe(parameter), kind_of(gradient, gradient.device()),
                    kind_of(parameter, parameter.device())));
  }
}

void FusedOptimizer::Update::check_state(const ParameterState& state, const at::Tensor& parameter) const {
  if (state.made_for.sizes() != parameter.sizes() || state.made_for.scalar_type() != parameter.scalar_type() ||
      state.device != parameter.device()) {
    throw ConfigError(
        fmt::format("{}.step: the state of {} is for {}, the parameter is {}; convert or move a model before its "
                    "optimizer is made",
                    optimizer_.name(), optimizer_.describe(parameter), kind_of(state.made_for, state.device),
                    kind_of(parameter, parameter.device())));
  }
  if (!same_layout(state.made_for, parameter)) {
    throw ConfigError(fmt::format(
        "{}.step: {} has changed its memory layout since the last step; change it before its optimizer is made",
        optimizer_.name(), optimizer_.describe(parameter)));
  }
}

std::unique_ptr<FusedOptimizer::ParameterState> FusedOptimizer::Update::first_state(
    const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) const {
  auto state = std::make_unique<ParameterState>();
  if (outside_ != nullptr) {
    *state = optimizer_.state_without_memory(parameter, options);
    outside_->place(*state);
  } else {
    state->made_for = at::empty_like(parameter, parameter.options().device(at::kMeta));
    state->device = parameter.device();
    optimizer_.make_state(*state, parameter, options);
  }
  return state;
}

// An option that needs more state may have been set since.
void FusedOptimizer::Update::place_new_tensors(ParameterState& state, const at::Tensor& parameter,
                                               const torch::optim::OptimizerOptions& options) const {
  std::optional<ParameterState> with_new;
  for (auto& [tensor_name, tensor] : optimizer_.state_without_memory(parameter, options).tensors) {
    if (!state.contains(tensor_name)) {
      if (!with_new) {
        with_new = state;
      }
      with_new->tensors.emplace_back(tensor_name, tensor);
      with_new->is_fresh = true;
    }
  }
  if (with_new) {
    outside_->place(*with_new);
    state = *std::move(with_new);
  }
}

FusedOptimizer::ParameterState* FusedOptimizer::Update::state_for(const at::Tensor& parameter,
                                                                  const torch::optim::OptimizerOptions& options) {
  void* key = parameter.unsafeGetTensorImpl();
  const auto known = optimizer_.state_.find(key);
  if (known == optimizer_.state_.end()) {
    return new_states_.emplace_back(key, first_state(parameter, options)).second.get();
  }
  auto* state = static_cast<ParameterState*>(known->second.get());
  if (outside_ != nullptr) {
    const int64_t end = outside_->end();
    place_new_tensors(*state, parameter, options);
    keeps_room_ = keeps_room_ || outside_->end() > end;
  }
  return state;
}

void FusedOptimizer::Update::collect(const torch::optim::OptimizerParamGroup& group, at::TensorList parameters,
                                     uint64_t first_element, const at::Tensor& grad_scale,
                                     const at::Tensor& found_inf) {
  const auto& options = *options_.emplace_back(group.options().clone());
  optimizer_.check_options(options);
  std::map<std::pair<std::string, at::ScalarType>, Work> by_kind;
  for (const at::Tensor& parameter : parameters) {
    const uint64_t first = std::exchange(first_element, first_element + static_cast<uint64_t>(parameter.numel()));
    if (!parameter.grad().defined()) {
      continue;
    }
    optimizer_.check_type(parameter);
    optimizer_.check_parameter(parameter);
    check_gradient(parameter);
    ParameterState* state = state_for(parameter, options);
    check_state(*state, parameter);
    Work& work = by_kind[{parameter.device().str(), parameter.scalar_type()}];
    work.parameters.push_back(parameter);
    work.gradients.push_back(in_layout_of(parameter, parameter.grad()));
    work.states.push_back(state);
    const auto elsewhere = optimizer_.first_elements_.find(parameter.unsafeGetTensorImpl());
    work.first_elements.push_back(elsewhere == optimizer_.first_elements_.end() ? first : elsewhere->second);
  }
  for (auto& [kind, work] : by_kind) {
    const c10::Device device = outside_ != nullptr ? at::kCPU : work.parameters.front().device();
    work.options = &options;
    work.grad_scale = on_device(grad_scale, device);
    work.found_inf = on_device(found_inf, device);
    works_.push_back(std::move(work));
  }
}

// --- prepared and written

void FusedOptimizer::Update::make(const std::function<void()>& before_writing) {
  const auto prepare_one = [this](const Work& work) { return optimizer_.prepare(work); };
  if (outside_ != nullptr) {
    streamed_ = outside_->stream(works_, prepare_one, optimizer_.copied_state());
  } else {
    std::transform(works_.begin(), works_.end(), std::back_inserter(writes_), prepare_one);
  }
  if (before_writing) {
    before_writing();
  }
  keeps_room_ = true;
  commit();
}

void FusedOptimizer::Update::commit() {
  for (auto& [key, state] : new_states_) {
    optimizer_.state_[key] = std::move(state);
  }
  for (const Work& work : works_) {
    for (size_t i = 0; i < work.parameters.size(); ++i) {
      work.parameters[i].mutable_grad() = work.gradients[i];  // the kernel unscales the gradient in place
    }
  }
  const auto tell_autograd = c10::make_scope_exit([&] {
    for (const Work& work : works_) {
      for (const at::Tensor& parameter : work.parameters) {
        // Kernels do not bump the version, and autograd must see the write.
        parameter.unsafeGetTensorImpl()->bump_version();
      }
    }
    Autocast::clear_cache();
  });
  if (streamed_) {
    stream();
    return;
  }
  for (size_t w = 0; w < works_.size(); ++w) {
    for (ParameterState* state : works_[w].states) {
      state->is_fresh = false;
    }
    writes_[w]();
  }
}

// Late updates have the options of now. After a failure they do nothing. before_writing() may have brought weights.
void FusedOptimizer::Update::stream() {
  const auto streamed = std::make_shared<StateOutside::Streamed>(*std::move(streamed_));
  const auto noted = [options = options_, &optimizer = optimizer_](const std::function<void()>& update) {
    try {
      update();
    } catch (const std::exception& error) {
      optimizer.half_made_ = error.what();
      throw Error(
          fmt::format("{}.step: the update has stopped midway, with some parameters updated: {}; go on from a snapshot "
                      "of model and optimizer",
                      optimizer.name(), optimizer.half_made_));
    }
  };
  noted([&] {
    streamed->run();
    for (StateOutside::Streamed::Late& late : streamed->late) {
      (void)detail::values_at_home(late.used.front());
      outside_->late().add(std::exchange(late.used, {}), [streamed, &late, noted, &optimizer = optimizer_] {
        for (const auto& update : std::exchange(late.updates, {})) {
          optimizer.half_made_.empty() ? noted(update) : void();
        }
      });
    }
  });
}

// --- FusedOptimizer

void FusedOptimizer::set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) {
  grad_scale_ = std::move(grad_scale);
  found_inf_ = std::move(found_inf);
}

bool FusedOptimizer::before_writing(std::function<void()> hook) {
  before_writing_ = std::move(hook);
  return true;
}

at::Tensor FusedOptimizer::step(LossClosure closure) {
  at::Tensor grad_scale = std::exchange(grad_scale_, {});
  at::Tensor found_inf = std::exchange(found_inf_, {});
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
  const at::NoGradGuard no_grad;
  Update update(*this);
  if (outside_) {  // read once, for all groups
    grad_scale = on_device(grad_scale, at::kCPU);
    found_inf = on_device(found_inf, at::kCPU);
  }
  uint64_t first_element = 0;
  for (const auto& group : param_groups_) {
    update.collect(group, group.params(), first_element, grad_scale, found_inf);
    for (const at::Tensor& parameter : group.params()) {
      first_element += static_cast<uint64_t>(parameter.numel());
    }
  }
  update.make(before_writing);
  return loss;
}

void FusedOptimizer::step_parameter(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  uint64_t first_element = 0;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& p : group.params()) {
      if (p.is_same(parameter)) {
        Update update(*this);
        update.collect(group, {parameter}, first_element);
        update.make({});
        return;
      }
      first_element += static_cast<uint64_t>(p.numel());
    }
  }
  throw ConfigError(fmt::format("{}.step_parameter: this optimizer does not hold the parameter", name()));
}

}  // namespace snug
