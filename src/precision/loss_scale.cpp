#include "src/precision/loss_scale.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/grad_scaler.h"

namespace snug::detail {

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
  if (o.min_scale != 0 && !is_a_scale(o.min_scale)) {
    throw ConfigError(
        fmt::format("GradScaler: min_scale is {}; it must be > 0 and finite in FP32, or 0 for none", o.min_scale));
  }
  if (o.min_scale > o.init_scale) {
    throw ConfigError(
        fmt::format("GradScaler: min_scale is {}, more than init_scale, which is {}; lower the one or raise the other",
                    o.min_scale, o.init_scale));
  }
  if (o.hysteresis < 1 || o.hysteresis > std::numeric_limits<int32_t>::max()) {
    throw ConfigError(fmt::format(
        "GradScaler: hysteresis is {}; it counts bad steps, so it must be >= 1 and fit into 32 bits", o.hysteresis));
  }
  if (o.max_consecutive_skips < 0) {
    throw ConfigError(fmt::format("GradScaler: max_consecutive_skips is {}; it must be >= 0, and 0 turns it off",
                                  o.max_consecutive_skips));
  }
}

at::Tensor scalar_on(c10::Device device, double value, c10::ScalarType dtype) {
  return at::full({}, value, at::TensorOptions().device(device).dtype(dtype));
}

void LossScale::make(c10::Device device, double first_scale, int64_t first_growth, int64_t first_hysteresis) {
  LossScale made;
  made.scale = scalar_on(device, first_scale);
  made.growth = scalar_on(device, static_cast<double>(first_growth), at::kInt);
  made.hysteresis = scalar_on(device, static_cast<double>(first_hysteresis), at::kInt);
  *this = made;
}

LossScale LossScale::next(const at::Tensor& found_inf, const GradScalerOptions& options) const {
  if (!options.dynamic) {
    return *this;
  }
  LossScale after{.scale = scale.clone(), .growth = growth.clone(), .hysteresis = hysteresis};
  at::_amp_update_scale_(after.scale, after.growth, found_inf, options.growth_factor, options.backoff_factor,
                         options.growth_interval);
  if (options.hysteresis == 1 && options.min_scale == 0) {
    return after;
  }
  // As in Megatron-LM's DynamicGradScaler.
  const at::Tensor bad = found_inf > 0;
  const at::Tensor left = (hysteresis - bad.to(at::kInt)).clamp_min(0);
  const at::Tensor grew = bad.logical_or(after.growth != 0).logical_not();
  after.scale = at::where(bad.logical_and(left > 0), scale, after.scale).clamp_min(options.min_scale);
  after.hysteresis = left.masked_fill(grew, options.hysteresis);
  return after;
}

void warn_unless_power_of_two(double scale) {
  const auto in_fp32 = static_cast<float>(scale);
  int exponent = 0;
  const float mantissa = std::frexp(in_fp32, &exponent);  // in [0.5, 1)
  if (mantissa == 0.5f) {
    return;
  }
  const double nearest = std::ldexp(1.0, std::min(mantissa < 0.75f ? exponent - 1 : exponent, 127));
  TORCH_WARN(fmt::format(
      "GradScaler: the static scale {} is no power of two, so scaling rounds every gradient; the nearest is {}", scale,
      nearest));
}

}  // namespace snug::detail
