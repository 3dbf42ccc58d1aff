#include "snug/precision/detail/precision_regions.h"

#include <algorithm>
#include <utility>

namespace snug::detail {
namespace {

thread_local PrecisionRegions* current_regions = nullptr;

}  // namespace

void PrecisionRegions::enter(const std::string& name) {
  if (std::find(entered.begin(), entered.end(), name) == entered.end()) {
    entered.push_back(name);
  }
}

PrecisionRegions* current_precision_regions() { return current_regions; }
void set_current_precision_regions(PrecisionRegions* regions) { current_regions = regions; }

PrecisionRegionsScope::PrecisionRegionsScope(PrecisionRegions* regions)
    : previous_(std::exchange(current_regions, regions)) {}
PrecisionRegionsScope::~PrecisionRegionsScope() { current_regions = previous_; }

}  // namespace snug::detail
