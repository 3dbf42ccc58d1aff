#pragma once
// This thread's whole autocast state, captured in forward and set again around a recomputation.

#include <vector>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include "src/precision/precision_regions.h"

namespace snug::detail {

struct AutocastState {
  struct PerDevice {
    c10::DeviceType device;
    bool enabled;
    c10::ScalarType dtype;
  };
  std::vector<PerDevice> devices;
  bool cache;
  bool fp32_reductions;
  PrecisionRegions* regions;  // of the running step; see PrecisionScope

  static AutocastState capture();
};

/// Sets the state on construction, restores the previous state on destruction, and counts as a level of nesting. The
/// cast cache is cleared when the outermost level ends, unless autocast was on before, in a region of another thread.
class [[nodiscard]] AutocastStateScope final {
 public:
  explicit AutocastStateScope(const AutocastState& state);
  ~AutocastStateScope();
  AutocastStateScope(const AutocastStateScope&) = delete;
  AutocastStateScope& operator=(const AutocastStateScope&) = delete;

 private:
  AutocastState previous_;
};

}  // namespace snug::detail
