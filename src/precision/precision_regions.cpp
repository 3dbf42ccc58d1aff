#include "src/precision/precision_regions.h"

#include <algorithm>

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

PrecisionRegionsScope::PrecisionRegionsScope(PrecisionRegions* regions) : current_(current_regions, regions) {}

}  // namespace snug::detail
