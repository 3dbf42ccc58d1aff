#include "snug/precision/grad_scaler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include "snug/core/error.h"
#include "snug/core/gradient_scaling.h"
#include "snug/precision/autocast.h"

// The state machine and the arithmetic follow torch/amp/grad_scaler.py (torch 2.13.0) and the kernels
// _amp_foreach_non_finite_check_and_unscale_ and _amp_update_scale_, which are the same in both languages.

namespace snug {
namespace {

at::Tensor scalar_on(c10::Device device, double value, c10::ScalarType dtype = at::kFloat) {
  return at::full({}, value, at::TensorOptions().device(device).dtype(dtype));
}

// The scale is kept in FP32, where a very large or small double would be infinite or zero and stay so.
bool is_a_scale(double value) {
  const auto in_fp32 = static_cast<float>(value);
  return in_fp32 > 0 && std::isfinite(in_fp32);
}

void check(const GradScalerOptions& o) {
  if (!is_a_scale(o.init_scale)) {
    throw ConfigError(fmt::format("GradScaler: init_scale is {}; it must be > 0 and finite in FP32", o.init_scale));
  }
  if (!(o.growth_factor > 1.0)) {
    throw ConfigError(fmt::format("GradScaler: growth_factor is {}; it must be > 1", o.growth_factor));
  }
  if (!(o.backoff_factor > 0.0 && o.backoff_factor < 1.0)) {
    throw ConfigError(fmt::format("GradScaler: backoff_factor is {}; it must be between 0 and 1", o.backoff_factor));
  }
  if (o.growth_interval < 1) {
    throw ConfigError(fmt::format("GradScaler: growth_interval is {}; it must be >= 1", o.growth_interval));
  }
}

}  // namespace

StepOutcome::operator bool() const {
  if (!stepped_) {
    stepped_ = std::none_of(found_inf_.begin(), found_inf_.end(),
                            [](const at::Tensor& found) { return found.item<float>() != 0; });
  }
  return *stepped_;
}

GradScaler::GradScaler(GradScalerOptions options) : options_(options), initial_scale_(options.init_scale) {
  check(options_);
}

void GradScaler::make_tensors(c10::Device device) {
  if (!scale_.defined()) {
    const at::Tensor scale = scalar_on(device, initial_scale_);  // the next line may throw, and both are there or none
    growth_tracker_ = scalar_on(device, static_cast<double>(initial_growth_tracker_), at::kInt);
    scale_ = scale;
  }
}

const at::Tensor& GradScaler::scale_on(c10::Device device,
                                       std::vector<std::pair<c10::Device, at::Tensor>>& copies) const {
  for (const auto& [where, copy] : copies) {
    if (where == device) {
      return copy;
    }
  }
  copies.emplace_back(device, scale_.to(device, /*non_blocking=*/true));
  return copies.back().second;
}

at::Tensor GradScaler::scale(const at::Tensor& output) { return scale(std::vector{output}).front(); }

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  if (!options_.enabled) {
    return outputs;
  }
  std::vector<at::Tensor> scaled;
  std::vector<std::pair<c10::Device, at::Tensor>> copies;
  for (const at::Tensor& output : outputs) {
    make_tensors(output.device());
    scaled.push_back(output * scale_on(output.device(), copies));
  }
  return scaled;
}

GradScaler::FoundInf GradScaler::divide_and_check(torch::optim::Optimizer& optimizer, const at::Tensor& inverse,
                                                  bool allow_fp16) const {
  struct ByDevice {
    at::Tensor inverse;
    at::Tensor found;
    std::map<c10::ScalarType, std::vector<at::Tensor>> gradients;
  };
  std::vector<std::pair<c10::Device, ByDevice>> devices;
  const auto entry_of = [&](c10::Device device) -> ByDevice& {
    const auto found =
        std::find_if(devices.begin(), devices.end(), [&](const auto& entry) { return entry.first == device; });
    if (found != devices.end()) {
      return found->second;
    }
    devices.emplace_back(device, ByDevice{inverse.to(device, true), scalar_on(device, 0.0), {}});
    return devices.back().second;
  };

  size_t index = 0;
  std::unordered_set<const void*> seen;  // a parameter of a shared module may be named twice
  for (auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.grad();
      ++index;
      if (!gradient.defined() || !seen.insert(gradient.unsafeGetTensorImpl()).second) {
        continue;
      }
      if (!allow_fp16 && gradient.scalar_type() == at::kHalf) {
        throw ConfigError(fmt::format(
            "GradScaler.unscale_: the gradient of parameter {} of this optimizer is FP16, so unscaling would "
            "bring back the underflow that scaling avoids; keep the parameters in FP32 and use Autocast, or "
            "give the optimizer FP32 master weights",
            index - 1));
      }
      // Embedding layers may give sparse gradients: their values are what is scaled.
      const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
      entry_of(values.device()).gradients[values.scalar_type()].push_back(values);
    }
  }
  FoundInf result;
  for (auto& [device, entry] : devices) {
    for (auto& [dtype, gradients] : entry.gradients) {
      at::_amp_foreach_non_finite_check_and_unscale_(gradients, entry.found, entry.inverse);
    }
    result.emplace_back(device, entry.found);
  }
  return result;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    return;
  }
  if (!scale_.defined()) {
    throw ConfigError("GradScaler.unscale_: nothing was scaled yet; call scale(loss).backward() first");
  }
  PerOptimizer& state = per_optimizer_[&optimizer];
  if (state.stage == Stage::Unscaled) {
    throw ConfigError(
        "GradScaler.unscale_: called twice for this optimizer since the last update(); call it once a step");
  }
  if (state.stage == Stage::Stepped) {
    throw ConfigError("GradScaler.unscale_: called after step(); unscale, then step, then update()");
  }
  const at::NoGradGuard no_grad;
  const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  state.found_inf = divide_and_check(optimizer, inverse, /*allow_fp16=*/false);
  state.stage = Stage::Unscaled;
}

StepOutcome GradScaler::step_on_device(torch::optim::Optimizer& optimizer, PerOptimizer& state) {
  auto& aware = dynamic_cast<GradientScalingAware&>(optimizer);
  at::Tensor grad_scale;
  if (state.stage == Stage::Ready) {
    // Checked but not divided: the optimizer divides in its own pass.
    state.found_inf = divide_and_check(optimizer, scalar_on(scale_.device(), 1.0), /*allow_fp16=*/true);
    grad_scale = scale_;
  }
  if (state.found_inf.empty()) {
    throw ConfigError("GradScaler.step: no parameter of this optimizer has a gradient; call backward() first");
  }
  at::Tensor found = state.found_inf.front().second;
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < state.found_inf.size(); ++i) {
    all.push_back(state.found_inf[i].second);
    if (i > 0) {
      found = found.maximum(all[i].to(found.device(), true));
    }
  }
  aware.set_gradient_scaling(grad_scale, found);
  optimizer.step();
  state.stage = Stage::Stepped;
  return StepOutcome(std::move(all));
}

StepOutcome GradScaler::step(torch::optim::Optimizer& optimizer) {
  const StepOutcome outcome = step_or_skip(optimizer);
  clear_autocast_cache();  // torch's optimizers do not
  return outcome;
}

StepOutcome GradScaler::step_or_skip(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return StepOutcome(true);
  }
  PerOptimizer& state = per_optimizer_[&optimizer];
  if (state.stage == Stage::Stepped) {
    throw ConfigError(
        "GradScaler.step: called twice for this optimizer since the last update(); call update() after the steps");
  }
  if (!scale_.defined()) {
    throw ConfigError("GradScaler.step: nothing was scaled yet; call scale(loss).backward() first");
  }
  const at::NoGradGuard no_grad;
  if (dynamic_cast<GradientScalingAware*>(&optimizer) != nullptr) {
    return step_on_device(optimizer, state);
  }
  if (state.stage == Stage::Ready) {
    unscale_(optimizer);
  }
  if (state.found_inf.empty()) {
    throw ConfigError("GradScaler.step: no parameter of this optimizer has a gradient; call backward() first");
  }
  std::vector<at::Tensor> found;
  for (const auto& entry : state.found_inf) {
    found.push_back(entry.second);
  }
  StepOutcome outcome(std::move(found));
  if (outcome) {
    optimizer.step();
  }
  state.stage = Stage::Stepped;
  return outcome;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) {
    return;
  }
  if (!scale_.defined()) {
    throw ConfigError("GradScaler.update: nothing was scaled yet; call scale(loss).backward() and step() first");
  }
  const at::NoGradGuard no_grad;
  if (new_scale) {
    if (!is_a_scale(*new_scale)) {
      throw ConfigError(
          fmt::format("GradScaler.update: new_scale is {}; it must be > 0 and finite in FP32", *new_scale));
    }
    scale_.fill_(*new_scale);
  } else {
    at::Tensor found;
    for (const auto& [optimizer, state] : per_optimizer_) {
      for (const auto& [device, tensor] : state.found_inf) {
        const at::Tensor here = tensor.to(scale_.device(), /*non_blocking=*/true);
        found = found.defined() ? found + here : here;
      }
    }
    if (!found.defined()) {
      throw ConfigError(
          "GradScaler.update: no step() or unscale_() found a gradient since the last update(); call backward() and "
          "step() first, or cancel() to give the step up");
    }
    at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor, options_.backoff_factor,
                           options_.growth_interval);
  }
  per_optimizer_.clear();
}

void GradScaler::cancel() { per_optimizer_.clear(); }

double GradScaler::get_scale() const {
  if (!options_.enabled) {
    return 1.0;
  }
  return scale_.defined() ? scale_.item<double>() : initial_scale_;
}

StateDict GradScaler::state_dict() const {
  StateDict state;
  if (!options_.enabled) {
    return state;
  }
  state.set("scale", get_scale());
  state.set("growth_factor", options_.growth_factor);
  state.set("backoff_factor", options_.backoff_factor);
  state.set("growth_interval", options_.growth_interval);
  state.set("_growth_tracker", growth_tracker_.defined() ? growth_tracker_.item<int64_t>() : initial_growth_tracker_);
  return state;
}

void GradScaler::load_state_dict(const StateDict& state) {
  if (!options_.enabled) {
    return;
  }
  if (state.empty()) {
    throw ConfigError(
        "GradScaler.load_state_dict: the state is empty, so it was saved by a disabled scaler; start this one afresh");
  }
  GradScalerOptions options = options_;
  options.init_scale = state.get<double>("scale");
  options.growth_factor = state.get<double>("growth_factor");
  options.backoff_factor = state.get<double>("backoff_factor");
  options.growth_interval = state.get<int64_t>("growth_interval");
  const auto tracker = state.get<int64_t>("_growth_tracker");
  if (options.init_scale == 0) {
    throw ConfigError(
        "GradScaler.load_state_dict: the scale is 0, so in the run that saved it every gradient had stopped being "
        "finite; "
        "load an earlier snapshot");
  }
  if (tracker < 0 || tracker > std::numeric_limits<int32_t>::max()) {
    throw ConfigError(fmt::format(
        "GradScaler.load_state_dict: _growth_tracker is {}; it counts steps, so it must be >= 0 and fit into 32 bits",
        tracker));
  }
  check(options);
  options.init_scale = options_.init_scale;
  options_ = options;
  initial_scale_ = state.get<double>("scale");
  initial_growth_tracker_ = tracker;
  if (scale_.defined()) {
    scale_.fill_(initial_scale_);
    growth_tracker_.fill_(tracker);
  }
}

}  // namespace snug
