#pragma once
// LossScale: the scale of a GradScaler with the counters on the device, and the rule for their changes. Nothing in this
// file waits for the device.

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace snug {
struct GradScalerOptions;
}

namespace snug::detail {

/// The scale is an FP32 number. In FP32 a very large or small double is infinite or zero, and stays infinite or zero.
bool is_a_scale(double value);

/// Throws ConfigError, naming the option, for values that cannot work.
void check(const GradScalerOptions& options);

/// Returns a scalar tensor.
at::Tensor scalar_on(c10::Device device, double value, c10::ScalarType dtype = c10::ScalarType::Float);

struct LossScale {
  at::Tensor scale;   // FP32 scalar; undefined before the first scaling
  at::Tensor growth;  // INT32 scalar: good steps in a row
  at::Tensor
      hysteresis;  // INT32 scalar: the bad step at which this falls to 0 backs the scale off, as does each one after it

  bool is_made() const { return scale.defined(); }
  /// Makes all three tensors, or throws and makes none.
  void make(c10::Device device, double first_scale, int64_t first_growth, int64_t first_hysteresis);
  /// The rule after a step: the next values of all three tensors. `found_inf`: FP32 scalar, > 0 if a gradient was not
  /// finite. All allocations are made inside next(), so that next() can be called before the optimizer steps.
  LossScale next(const at::Tensor& found_inf, const GradScalerOptions& options) const;
};

/// A static scale that is not a power of two rounds every gradient twice, and is seldom intended. Warns through
/// LibTorch's warnings.
void warn_unless_power_of_two(double scale);

}  // namespace snug::detail
