#include "src/step/step_precision.h"

#include <ATen/ATen.h>

#include "snug/autocast.h"

namespace snug::detail {
namespace {

GradScalerOptions scaler_options(GradScalerOptions options, Precision precision) {
  options.enabled = options.enabled && precision == Precision::Float16;
  return options;
}

// Nobody has tried the choice of Auto on the model, so Auto has a guard.
PrecisionGuardOptions guard_options(PrecisionGuardOptions options, Precision asked) {
  if (asked == Precision::Auto && !options.patience) {
    options.patience = PrecisionGuardOptions::kPatienceOfAuto;
  }
  return options;
}

}  // namespace

StepPrecision::StepPrecision(const StepperOptions& options, Precision precision, c10::Device device,
                             std::function<void(const at::Tensor&)> agree_by, const NamedTensors& parameters)
    : options_(options),
      device_(device),
      agree_by_(std::move(agree_by)),
      precision_(precision),
      scaler_(scaler_options(options.sixteen_bit.scaler, precision)),
      guard_(guard_options(options.sixteen_bit.guard, options.precision)) {
  scaler_.name_parameters(parameters);
  scaler_.agree_by(agree_by_);
  scale();  // the scaler makes its tensors at the first scale(); a step that is measured must not pay for the tensors
  regions_.device = device.type();
}

at::Tensor StepPrecision::scale() { return scaler_.scale(at::ones({}, at::TensorOptions().device(device_))); }

Loss StepPrecision::forward(const std::function<Loss()>& loss_of) const {
  std::optional<Autocast> autocast;
  std::optional<PrecisionScope> whole_step_in_fp32;
  if (is_low()) {
    autocast.emplace(device_.type(), compute_dtype(precision_),
                     AutocastOptions{.fp32_reductions = options_.sixteen_bit.fp32_reductions});
  }
  if (guard_.is_full("")) {
    whole_step_in_fp32.emplace("");
  }
  Autocast::clear_cache();  // of a region around the step: each micro-batch casts weights, as planned
  return loss_of();
}

void StepPrecision::look_at_gradients(const NamedTensors& parameters) {
  if (guard_.is_on() && is_low()) {
    evidence_ = gradient_evidence(parameters, regions_.entered);
  }
}

void StepPrecision::move_regions(StepResult& result) {
  if (const auto evidence = std::exchange(evidence_, nullptr)) {
    result.precision_changes = guard_.observe(evidence());
    regions_.in_full = guard_.full_regions();
  }
}

void StepPrecision::add_to(StateDict& state) const {
  state.set("precision", std::string(to_string(precision_)));
  state.set("scaler", scaler_.state_dict());
  if (guard_.is_on()) {
    state.set("precision_guard", state_of(guard_));
  }
}

StepPrecision StepPrecision::restored(const StateDict& state, Precision saved, const NamedTensors& parameters) const {
  StepPrecision result(options_, saved, device_, agree_by_, parameters);
  result.scaler_.load_state_dict(state.get<StateDict>("scaler"));
  result.scale();
  result.guard_ = guard_;
  if (guard_.is_on() && state.contains("precision_guard")) {
    result.guard_.restore(regions_from(state.get<StateDict>("precision_guard")));
  }
  result.regions_.in_full = result.guard_.full_regions();
  return result;
}

}  // namespace snug::detail
