#pragma once
// AutocastRegion: autocast with the settings of a region in the graph, as Python's context manager enters and leaves
// it.

#include <ATen/autocast_mode.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace snug::detail {

class [[nodiscard]] AutocastRegion final {
 public:
  AutocastRegion(c10::DeviceType device, c10::ScalarType dtype, bool enabled, bool cache)
      : device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        had_cache_(at::autocast::is_autocast_cache_enabled()),
        dtype_before_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::set_autocast_cache_enabled(cache);
    at::autocast::increment_nesting();
  }
  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;
  ~AutocastRegion() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_before_);
    at::autocast::set_autocast_cache_enabled(had_cache_);
  }

 private:
  c10::DeviceType device_;
  bool was_enabled_, had_cache_;
  c10::ScalarType dtype_before_;
};

}  // namespace snug::detail
