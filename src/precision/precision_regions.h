#pragma once
// PrecisionRegions: the regions of a step that are in FP32, and the regions that were entered. The current object
// belongs to a thread.

#include <set>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>

#include "src/core/replaced.h"

namespace snug::detail {

struct PrecisionRegions {
  c10::DeviceType device = c10::DeviceType::CPU;
  std::set<std::string> in_full;
  std::vector<std::string> entered;  // in the order of their first entry

  void enter(const std::string& name);
};

/// This thread's object, or null.
PrecisionRegions* current_precision_regions();

/// While a PrecisionRegionsScope lives, `regions` is this thread's object.
class [[nodiscard]] PrecisionRegionsScope final {
 public:
  explicit PrecisionRegionsScope(PrecisionRegions* regions);

 private:
  Replaced<PrecisionRegions*> current_;
};

}  // namespace snug::detail
