#include "snug/precision/autocast.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/precision/detail/autocast_state.h"

// LibTorch caches the 16-bit cast of a weight under the weight's identity, not its version. A weight that is updated while the
// cache lives is then used in its old form, silently. Hence the rule kept here: the cache never outlives the outermost
// region, nor an optimizer step.

namespace snug {
namespace {

void leave_level() {
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
}

}  // namespace

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
  at::autocast::set_autocast_enabled(device, options.enabled);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::set_autocast_cache_enabled(options.cache);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  leave_level();
  at::autocast::set_autocast_enabled(device_, previous_enabled_);
  at::autocast::set_autocast_dtype(device_, previous_dtype_);
  at::autocast::set_autocast_cache_enabled(previous_cache_);
}

void clear_autocast_cache() { at::autocast::clear_cache(); }

namespace detail {
namespace {

void set(const AutocastState& state) {
  for (const auto& [device, enabled, dtype] : state.devices) {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
  }
  at::autocast::set_autocast_cache_enabled(state.cache);
  set_current_precision_regions(state.regions);
}

// The CPU and, where there is one, the accelerator of this machine.
std::vector<c10::DeviceType> devices_with_autocast() {
  std::vector<c10::DeviceType> devices{c10::DeviceType::CPU};
  if (const auto accelerator = at::getAccelerator(); accelerator && at::autocast::is_autocast_available(*accelerator)) {
    devices.push_back(*accelerator);
  }
  return devices;
}

}  // namespace

AutocastState AutocastState::capture() {
  AutocastState state;
  for (const c10::DeviceType device : devices_with_autocast()) {
    state.devices.push_back(
        {device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
  }
  state.cache = at::autocast::is_autocast_cache_enabled();
  state.regions = current_precision_regions();
  return state;
}

AutocastStateScope::AutocastStateScope(const AutocastState& state) : previous_(AutocastState::capture()) {
  set(state);
  at::autocast::increment_nesting();
}

AutocastStateScope::~AutocastStateScope() {
  leave_level();
  set(previous_);
}

}  // namespace detail
}  // namespace snug
