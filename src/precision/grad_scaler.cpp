#include "snug/grad_scaler.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include "snug/autocast.h"
#include "snug/core.h"
#include "src/core/number_in.h"
#include "src/core/optimizer_capabilities.h"
#include "src/precision/loss_scale.h"
#include "src/precision/scaled_gradients.h"

// The state machine and the arithmetic follow torch/amp/grad_scaler.py (torch 2.13.0) and the kernels
// _amp_foreach_non_finite_check_and_unscale_ and _amp_update_scale_. Both languages have the same kernels.

namespace snug {
namespace {

// The names in a saved state. The first name is Python's.
constexpr const char* kGrowthTracker = "_growth_tracker";
constexpr const char* kHysteresisTracker = "_hysteresis_tracker";
constexpr const char* kSkips = "_consecutive_skips";

void check_count(const char* name, int64_t value) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max()) {
    throw ConfigError(fmt::format(
        "GradScaler.load_state_dict: {} is {}; it counts steps, so it must be >= 0 and fit into 32 bits", name, value));
  }
}

int64_t count_or(const StateDict& state, const char* name, int64_t otherwise) {
  const int64_t value = state.contains(name) ? state.get<int64_t>(name) : otherwise;
  check_count(name, value);
  return value;
}

std::vector<at::Tensor> tensors_of(const detail::FoundInf& found_inf) {
  std::vector<at::Tensor> tensors;
  for (const auto& [device, tensor] : found_inf) {
    tensors.push_back(tensor);
  }
  return tensors;
}

}  // namespace

GradScaler::Outcome::operator bool() const {
  if (!stepped_) {
    stepped_ = std::none_of(found_inf_.begin(), found_inf_.end(),
                            [](const at::Tensor& found) { return found.item<float>() != 0; });
  }
  return *stepped_;
}

class GradScaler::Impl {
 public:
  explicit Impl(GradScalerOptions options)
      : options_(options), first_scale_(options.init_scale), first_hysteresis_(options.hysteresis) {
    detail::check(options_);
    warn_if_inexact(first_scale_);
  }

  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);
  void unscale_(torch::optim::Optimizer& optimizer);
  bool will_skip(const torch::optim::Optimizer& optimizer) const;
  GradScaler::Outcome step(torch::optim::Optimizer& optimizer);
  void update(std::optional<double> new_scale);
  void cancel() {
    per_optimizer_.clear();
    next_.reset();
  }
  void name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& names) { names_.set(names); }
  void agree_by(std::function<void(const at::Tensor&)> agree) { agree_ = std::move(agree); }
  double get_scale() const;
  const GradScalerOptions& options() const { return options_; }
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  enum class Stage { Ready, Unscaled, Stepped };
  struct PerOptimizer {
    const torch::optim::Optimizer* optimizer;
    Stage stage = Stage::Ready;
    detail::FoundInf found_inf;
    std::string culprit;  // the first parameter without a finite gradient, if this round may be one skip too many
  };

  PerOptimizer& state_of(const torch::optim::Optimizer& optimizer);
  void refuse_fp16(const std::vector<detail::ParameterPlace>& places) const;
  void agree(detail::FoundInf& found_inf) const;
  void look_for_culprit(PerOptimizer& state, const std::vector<detail::ParameterPlace>& places) const;
  GradScaler::Outcome step_on_device(torch::optim::Optimizer& optimizer, GradientScalingAware& aware,
                                     PerOptimizer& state);
  at::Tensor found_by_all() const;
  void prepare_update();
  std::string too_many_skips() const;
  void warn_if_inexact(double scale) const;

  GradScalerOptions options_;
  std::function<void(const at::Tensor&)> agree_;
  // The next values, for update(); empty if more gradients were checked since.
  struct Next {
    at::Tensor found;
    detail::LossScale scale;
  };

  detail::LossScale scale_;  // made on the device of the first scaled output; until then:
  double first_scale_;
  int64_t first_growth_ = 0;
  int64_t first_hysteresis_;
  int64_t skips_ = 0;                        // in a row; counted only for max_consecutive_skips
  std::vector<PerOptimizer> per_optimizer_;  // in the order of each optimizer's first call
  std::optional<Next> next_;
  detail::ParameterNames names_;
};

void GradScaler::Impl::warn_if_inexact(double scale) const {
  if (options_.enabled && !options_.dynamic) {
    detail::warn_unless_power_of_two(scale);
  }
}

GradScaler::Impl::PerOptimizer& GradScaler::Impl::state_of(const torch::optim::Optimizer& optimizer) {
  for (PerOptimizer& state : per_optimizer_) {
    if (state.optimizer == &optimizer) {
      return state;
    }
  }
  return per_optimizer_.emplace_back(PerOptimizer{&optimizer, Stage::Ready, {}, {}});
}

std::vector<at::Tensor> GradScaler::Impl::scale(const std::vector<at::Tensor>& outputs) {
  if (!options_.enabled) {
    return outputs;
  }
  std::vector<at::Tensor> scaled;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, at::Tensor> copies;
  for (const at::Tensor& output : outputs) {
    if (!output.defined()) {
      throw ConfigError(
          fmt::format("GradScaler.scale: output {} of {} is undefined; give losses or outputs of the model",
                      scaled.size(), outputs.size()));
    }
    const c10::Device device = output.device();
    if (!scale_.is_made()) {
      scale_.make(device, first_scale_, first_growth_, first_hysteresis_);
    }
    at::Tensor& copy = copies[{device.type(), device.index()}];
    if (!copy.defined()) {
      copy = scale_.scale.to(device, /*non_blocking=*/true);
    }
    scaled.push_back(output * copy);
  }
  return scaled;
}

void GradScaler::Impl::refuse_fp16(const std::vector<detail::ParameterPlace>& places) const {
  for (const detail::ParameterPlace& place : places) {
    if (place.parameter.grad().scalar_type() == at::kHalf) {
      throw ConfigError(fmt::format(
          "GradScaler.unscale_: the gradient of {} is FP16, so unscaling would bring back the underflow that scaling "
          "avoids; keep the parameters in FP32 and use Autocast, or give the optimizer FP32 master weights",
          names_.describe(place)));
    }
  }
}

// A process without gradients agrees with the other processes, too.
void GradScaler::Impl::agree(detail::FoundInf& found_inf) const {
  if (!agree_) {
    return;
  }
  if (found_inf.empty()) {
    found_inf.emplace_back(scale_.scale.device(), detail::scalar_on(scale_.scale.device(), 0.0));
  }
  for (const auto& [device, tensor] : found_inf) {
    agree_(tensor);
  }
}

// Looks at once, because clipping may turn one NaN into many NaNs.
void GradScaler::Impl::look_for_culprit(PerOptimizer& state, const std::vector<detail::ParameterPlace>& places) const {
  if (options_.max_consecutive_skips > 0 && skips_ + 1 >= options_.max_consecutive_skips &&
      !GradScaler::Outcome(tensors_of(state.found_inf))) {
    state.culprit = detail::first_non_finite(places, names_);
  }
}

void GradScaler::Impl::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    return;
  }
  if (!scale_.is_made()) {
    throw ConfigError("GradScaler.unscale_: nothing was scaled yet; call scale(loss).backward() first");
  }
  PerOptimizer& state = state_of(optimizer);
  if (state.stage == Stage::Unscaled) {
    throw ConfigError(
        "GradScaler.unscale_: called twice for this optimizer since the last update(); call it once a step");
  }
  if (state.stage == Stage::Stepped) {
    throw ConfigError("GradScaler.unscale_: called after step(); unscale, then step, then update()");
  }
  const at::NoGradGuard no_grad;
  const auto places = detail::gradients_of(optimizer);
  refuse_fp16(places);
  next_.reset();
  const at::Tensor inverse = scale_.scale.to(at::kDouble).reciprocal().to(at::kFloat);
  state.found_inf = detail::unscale_and_check(places, inverse);
  agree(state.found_inf);
  state.stage = Stage::Unscaled;
  look_for_culprit(state, places);
}

bool GradScaler::Impl::will_skip(const torch::optim::Optimizer& optimizer) const {
  return std::ranges::any_of(per_optimizer_, [&](const PerOptimizer& state) {
    return state.optimizer == &optimizer && !GradScaler::Outcome(tensors_of(state.found_inf));
  });
}

GradScaler::Outcome GradScaler::Impl::step_on_device(torch::optim::Optimizer& optimizer, GradientScalingAware& aware,
                                                     PerOptimizer& state) {
  at::Tensor grad_scale;
  if (state.stage == Stage::Ready) {
    // Checked but not divided: the optimizer divides inside its own pass.
    const auto places = detail::gradients_of(optimizer);
    state.found_inf = detail::check_finite(places);
    agree(state.found_inf);
    look_for_culprit(state, places);
    grad_scale = scale_.scale;
  }
  const std::vector<at::Tensor> all = tensors_of(state.found_inf);
  at::Tensor found = all.empty() ? detail::scalar_on(scale_.scale.device(), 0.0) : all.front();
  for (size_t i = 1; i < all.size(); ++i) {
    found = found.maximum(all[i].to(found.device(), true));
  }
  prepare_update();
  aware.set_gradient_scaling(grad_scale, found);
  optimizer.step();
  state.stage = Stage::Stepped;
  return GradScaler::Outcome(all);
}

GradScaler::Outcome GradScaler::Impl::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return GradScaler::Outcome(true);
  }
  PerOptimizer& state = state_of(optimizer);
  if (state.stage == Stage::Stepped) {
    throw ConfigError(
        "GradScaler.step: called twice for this optimizer since the last update(); call update() after the steps");
  }
  if (!scale_.is_made()) {
    throw ConfigError("GradScaler.step: nothing was scaled yet; call scale(loss).backward() first");
  }
  const at::NoGradGuard no_grad;
  if (GradientScalingAware* aware = detail::capabilities_of(optimizer).scaling) {
    return step_on_device(optimizer, *aware, state);
  }
  if (state.stage == Stage::Ready) {
    unscale_(optimizer);
  }
  if (state.found_inf.empty()) {
    throw ConfigError(
        "GradScaler.step: no parameter of this optimizer has a gradient; call backward() first, or leave the step out");
  }
  prepare_update();
  GradScaler::Outcome outcome(tensors_of(state.found_inf));
  if (outcome) {
    optimizer.step();
  }
  state.stage = Stage::Stepped;
  return outcome;
}

at::Tensor GradScaler::Impl::found_by_all() const {
  at::Tensor found;
  for (const PerOptimizer& state : per_optimizer_) {
    for (const auto& [device, tensor] : state.found_inf) {
      const at::Tensor here = tensor.to(scale_.scale.device(), /*non_blocking=*/true);
      found = found.defined() ? found + here : here;
    }
  }
  return found;
}

// Called before the optimizer steps. If memory runs out after the step, the weights are new and the scale is old.
void GradScaler::Impl::prepare_update() {
  next_.reset();
  if (const at::Tensor found = found_by_all(); found.defined()) {
    next_ = {found, scale_.next(found, options_)};
  }
}

std::string GradScaler::Impl::too_many_skips() const {
  std::string culprit;
  for (const PerOptimizer& state : per_optimizer_) {
    if (culprit.empty()) {
      culprit = state.culprit;
    }
  }
  return fmt::format(
      "GradScaler.update: {} steps in a row were skipped, the last at scale {}, and max_consecutive_skips is {}; the "
      "first to blame is {}; lower the learning rate, clip gradients, look at that layer, or use bfloat16, which needs "
      "no scaling",
      skips_ + 1, get_scale(), options_.max_consecutive_skips, culprit);
}

void GradScaler::Impl::update(std::optional<double> new_scale) {
  if (!options_.enabled) {
    return;
  }
  if (!scale_.is_made()) {
    throw ConfigError("GradScaler.update: nothing was scaled yet; call scale(loss).backward() and step() first");
  }
  if (new_scale && !detail::is_a_scale(*new_scale)) {
    throw ConfigError(fmt::format("GradScaler.update: new_scale is {}; it must be > 0 and finite in FP32", *new_scale));
  }
  if (new_scale && *new_scale < options_.min_scale) {
    throw ConfigError(fmt::format("GradScaler.update: new_scale is {}, less than min_scale, which is {}", *new_scale,
                                  options_.min_scale));
  }
  const at::NoGradGuard no_grad;
  if (!next_) {
    prepare_update();
  }
  const at::Tensor found = next_ ? next_->found : at::Tensor();
  if (!new_scale && !found.defined()) {
    throw ConfigError(
        "GradScaler.update: no step() or unscale_() found a gradient since the last update(); call backward() and "
        "step() first, or cancel() to give the step up");
  }
  // Everything that may throw comes first, so that a round can be continued.
  std::optional<std::string> failure;
  const bool counts = options_.max_consecutive_skips > 0 && found.defined();
  const bool skipped = counts && found.item<float>() > 0;
  if (skipped && skips_ + 1 >= options_.max_consecutive_skips) {
    failure = too_many_skips();
  }
  if (new_scale) {
    warn_if_inexact(*new_scale);
    scale_.scale.fill_(*new_scale);
  } else {
    scale_ = std::move(next_->scale);
  }
  if (counts) {
    skips_ = skipped ? skips_ + 1 : 0;
  }
  cancel();
  if (failure) {
    throw NonFinite(*failure);
  }
}

double GradScaler::Impl::get_scale() const {
  if (!options_.enabled) {
    return 1.0;
  }
  return scale_.is_made() ? scale_.scale.item<double>() : first_scale_;
}

StateDict GradScaler::Impl::state_dict() const {
  StateDict state;
  if (!options_.enabled) {
    return state;
  }
  state.set("scale", get_scale());
  state.set("growth_factor", options_.growth_factor);
  state.set("backoff_factor", options_.backoff_factor);
  state.set("growth_interval", options_.growth_interval);
  state.set(kGrowthTracker, scale_.is_made() ? scale_.growth.item<int64_t>() : first_growth_);
  if (options_.hysteresis > 1) {
    state.set(kHysteresisTracker, scale_.is_made() ? scale_.hysteresis.item<int64_t>() : first_hysteresis_);
  }
  if (options_.max_consecutive_skips > 0) {
    state.set(kSkips, skips_);
  }
  return state;
}

void GradScaler::Impl::load_state_dict(const StateDict& state) {
  if (!options_.enabled) {
    return;
  }
  if (state.empty()) {
    throw ConfigError(
        "GradScaler.load_state_dict: the state is empty, so it was saved by a disabled scaler; start this one afresh");
  }
  GradScalerOptions options = options_;
  options.growth_factor = detail::number_in(state, "growth_factor");
  options.backoff_factor = detail::number_in(state, "backoff_factor");
  options.growth_interval = state.get<int64_t>("growth_interval");
  detail::check(options);
  const double saved_scale = detail::number_in(state, "scale");
  const double scale = std::max(saved_scale, options_.min_scale);
  if (saved_scale == 0 && scale == 0) {
    throw ConfigError(
        "GradScaler.load_state_dict: the scale is 0, so in the run that saved it every gradient had stopped being "
        "finite; load an earlier snapshot, or set min_scale");
  }
  if (!detail::is_a_scale(scale) || !(saved_scale >= 0)) {
    throw ConfigError(
        fmt::format("GradScaler.load_state_dict: scale is {}; it must be > 0 and finite in FP32", saved_scale));
  }
  const int64_t growth = state.get<int64_t>(kGrowthTracker);
  check_count(kGrowthTracker, growth);
  const int64_t hysteresis = count_or(state, kHysteresisTracker, options_.hysteresis);
  const int64_t skips = count_or(state, kSkips, 0);
  warn_if_inexact(scale);
  next_.reset();
  options_ = options;
  first_scale_ = scale;
  first_growth_ = growth;
  first_hysteresis_ = std::min(hysteresis, options_.hysteresis);
  skips_ = skips;
  if (scale_.is_made()) {
    scale_.scale.fill_(first_scale_);
    scale_.growth.fill_(first_growth_);
    scale_.hysteresis.fill_(first_hysteresis_);
  }
}

GradScaler::GradScaler(GradScalerOptions options) : impl_(std::make_unique<Impl>(options)) {}
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;
GradScaler::~GradScaler() = default;

at::Tensor GradScaler::scale(const at::Tensor& output) { return scale(std::vector{output}).front(); }
std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) { return impl_->scale(outputs); }
void GradScaler::unscale_(torch::optim::Optimizer& optimizer) { impl_->unscale_(optimizer); }
bool GradScaler::will_skip(const torch::optim::Optimizer& optimizer) const { return impl_->will_skip(optimizer); }

GradScaler::Outcome GradScaler::step(torch::optim::Optimizer& optimizer) {
  const GradScaler::Outcome outcome = impl_->step(optimizer);
  Autocast::clear_cache();  // torch's optimizers do not clear the cache
  return outcome;
}

void GradScaler::update(std::optional<double> new_scale) { impl_->update(new_scale); }
void GradScaler::update(const at::Tensor& new_scale) {
  if (!is_enabled()) {
    return;
  }
  if (!new_scale.defined() || new_scale.numel() != 1 || !new_scale.is_floating_point() || new_scale.requires_grad()) {
    throw ConfigError(
        "GradScaler.update: new_scale must be a number, or a tensor of one floating-point number without gradient");
  }
  impl_->update(new_scale.item<double>());
}
void GradScaler::cancel() { impl_->cancel(); }
void GradScaler::agree_by(std::function<void(const at::Tensor&)> agree) { impl_->agree_by(std::move(agree)); }
void GradScaler::name_parameters(std::vector<std::pair<std::string, at::Tensor>> names) {
  impl_->name_parameters(names);
}
double GradScaler::get_scale() const { return impl_->get_scale(); }
bool GradScaler::is_enabled() const { return impl_->options().enabled; }
const GradScalerOptions& GradScaler::options() const { return impl_->options(); }
StateDict GradScaler::state_dict() const { return impl_->state_dict(); }
void GradScaler::load_state_dict(const StateDict& state) { impl_->load_state_dict(state); }

}  // namespace snug
