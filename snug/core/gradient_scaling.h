#pragma once
// GradientScalingAware: the interface between a gradient scaler and an optimizer, which otherwise do not know each
// other. An optimizer that implements it unscales and skips on the device, inside its own pass over the parameters, so
// that no step waits for the host.

#include <ATen/core/Tensor.h>

namespace snug {

class GradientScalingAware {
 public:
  virtual ~GradientScalingAware() = default;

  /// Applies to the next step() only.
  /// - `grad_scale`: FP32 scalar tensor. The step divides the gradients by it. Undefined if they are unscaled already.
  /// - `found_inf`: FP32 scalar tensor. If it is 1, the step changes neither parameters nor state.
  virtual void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) = 0;
};

}  // namespace snug
