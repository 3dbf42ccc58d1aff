#pragma once
// lower_bound_seconds() and lower_bound_bytes(): the least time of any plan within a number of bytes, and the fewest
// bytes of any plan.

#include <cstdint>

#include "src/planner/simulator.h"

namespace snug::plan {

/// A bound on time: no plan within `budget` bytes takes fewer seconds. Infinity if the bound shows that no plan fits.
double lower_bound_seconds(const Simulator& simulator, int64_t budget);
/// A bound on bytes: no plan has a lower peak. So many bytes are alive during some event of the step even if every
/// storage is absent that may be absent during the event.
int64_t lower_bound_bytes(const Simulator& simulator);

}  // namespace snug::plan
