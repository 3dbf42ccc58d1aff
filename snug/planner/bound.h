#pragma once
// How fast a plan within a number of bytes can be at best, and how few bytes any plan takes.

#include <cstdint>

#include "snug/planner/simulator.h"

namespace snug::plan {

/// Seconds that no plan within `budget` bytes undercuts; infinity if it can be seen that none fits.
double lower_bound_seconds(const StepSimulator& simulator, int64_t budget);
/// Peak in bytes that no plan undercuts: what is alive in some event when all is absent that may be absent then.
int64_t lower_bound_bytes(const StepSimulator& simulator);

}  // namespace snug::plan
