#include "snug/autocast.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core.h"
#include "src/precision/fp32_reductions.h"

// LibTorch caches the 16-bit cast of a weight under the weight's identity, not the weight's version. If a weight is
// updated while the cache lives, the old cast is then used silently. Hence the rule of this file: the cache never
// outlives the outermost region, nor an optimizer step.

namespace snug {
Autocast::Autocast(c10::DeviceType device, c10::ScalarType dtype, AutocastOptions options) : device_(device) {
  if (dtype != c10::ScalarType::BFloat16 && dtype != c10::ScalarType::Half) {
    throw ConfigError(
        fmt::format("Autocast: {} is not a type to cast to; give kBFloat16 or kHalf", c10::toString(dtype)));
  }
  if (!at::autocast::is_autocast_available(device)) {
    throw ConfigError(
        fmt::format("Autocast: LibTorch has no autocast for device type {}", c10::DeviceTypeName(device, true)));
  }
  previous_enabled_ = at::autocast::is_autocast_enabled(device);
  previous_dtype_ = at::autocast::get_autocast_dtype(device);
  previous_cache_ = at::autocast::is_autocast_cache_enabled();
  previous_fp32_reductions_ = detail::fp32_reductions();
  if (device == c10::DeviceType::CPU) {
    detail::set_fp32_reductions(options.fp32_reductions);
  }
  at::autocast::set_autocast_enabled(device, options.enabled);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::set_autocast_cache_enabled(options.cache);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  at::autocast::set_autocast_enabled(device_, previous_enabled_);
  at::autocast::set_autocast_dtype(device_, previous_dtype_);
  at::autocast::set_autocast_cache_enabled(previous_cache_);
  detail::set_fp32_reductions(previous_fp32_reductions_);
}

void Autocast::clear_cache() { at::autocast::clear_cache(); }

void Autocast::check_cache(const std::vector<at::Tensor>& weights) {
  if (!at::autocast::is_autocast_cache_enabled()) {
    return;
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& weight = weights[i];
    if (!weight.defined() || !at::autocast::is_autocast_available(weight.device().type()) ||
        !at::autocast::is_autocast_enabled(weight.device().type())) {
      continue;
    }
    const auto dtype = at::autocast::get_autocast_dtype(weight.device().type());
    // The cast that an operator of the region gets.
    const at::Tensor used = at::autocast::cached_cast(dtype, weight, weight.device().type());
    if (used.is_same(weight)) {
      continue;  // autocast does not cast this type
    }
    const at::NoGradGuard no_grad;
    const at::Tensor now = weight.to(dtype);
    if (!at::equal(used.view(at::kShort), now.view(at::kShort))) {  // compares bits, as NaN != NaN
      throw Error(fmt::format(
          "Autocast.check_cache: weight {} [{}] was written to after the region cast it to {}, and the old cast "
          "would be used on; call Autocast::clear_cache() after writing to weights",
          i, fmt::join(weight.sizes(), ", "), c10::toString(dtype)));
    }
  }
}

}  // namespace snug
