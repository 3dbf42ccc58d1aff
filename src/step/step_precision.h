#pragma once
// StepPrecision: the precision of a step: the type of forward, the scale of the loss, and the regions that the
// precision guard has moved to FP32.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "snug/stepper.h"
#include "src/precision/guard_evidence.h"
#include "src/precision/precision_guard.h"
#include "src/precision/precision_regions.h"

namespace snug::detail {

class StepPrecision {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  /// `precision`: the precision of `options`, with Auto resolved. `agree_by`: see GradScaler; empty alone.
  StepPrecision(const StepperOptions& options, Precision precision, c10::Device device,
                std::function<void(const at::Tensor&)> agree_by, const NamedTensors& parameters);

  Precision precision() const { return precision_; }
  bool is_low() const { return precision_ != Precision::Float32; }
  GradScaler& scaler() { return scaler_; }
  /// The loss scale, a scalar on the device.
  at::Tensor scale();
  /// The regions for forward; null without a guard.
  PrecisionRegions* regions() { return guard_.is_on() ? &regions_ : nullptr; }

  /// Runs `loss_of()` under autocast.
  Loss forward(const std::function<Loss()>& loss_of) const;
  /// Shows unscaled gradients to the guard. Does not wait for the device.
  void look_at_gradients(const NamedTensors& parameters);
  /// For a step that is given up.
  void forget_gradients() { evidence_ = nullptr; }
  /// After the update is queued: the guard may move regions, judging by the gradients shown to the guard. With a guard,
  /// waits until the device has looked at the gradients.
  void move_regions(StepResult& result);

  void add_to(StateDict& state) const;
  /// A copy with the values of `state`, which add_to() made in a run of precision `saved`. Throws CorruptFile for any
  /// other state.
  StepPrecision restored(const StateDict& state, Precision saved, const NamedTensors& parameters) const;

 private:
  StepperOptions options_;
  c10::Device device_;
  std::function<void(const at::Tensor&)> agree_by_;
  Precision precision_;
  GradScaler scaler_;
  PrecisionGuard guard_;
  PrecisionRegions regions_;
  std::function<GradientEvidence()> evidence_;
};

}  // namespace snug::detail
