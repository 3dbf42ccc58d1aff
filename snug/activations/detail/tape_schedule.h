#pragma once

#include "snug/activations/detail/op_tape.h"
#include "snug/planner/simulator.h"

namespace snug::detail {

/// What a tape does to follow a plan. `simulation` is that of the plan.
TapeSchedule make_schedule(const StepProfile& profile, const HoldFrom& plan, const Simulation& simulation);

}  // namespace snug::detail
