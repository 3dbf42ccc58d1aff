#pragma once
// lower_bound_seconds: how fast a plan within a number of bytes can be at best.

#include <cstdint>

#include "snug/planner/simulator.h"

namespace snug::plan {

/// Seconds that no plan within `budget` bytes undercuts; infinity if it can be seen that none fits.
double lower_bound_seconds(const StepSimulator& simulator, int64_t budget);

}  // namespace snug::plan

namespace snug {  // its name of before, for one release

using plan::lower_bound_seconds;

}  // namespace snug
