#pragma once

#include <memory>

#include "snug/activations/detail/op_tape.h"
#include "snug/planner/simulator.h"

namespace snug::detail {

/// What a tape does to follow a plan. `simulation` is that of the plan. What it offloads goes to `store`; without one, to a store of the
/// profile's link: throws Error if there can be none.
TapeSchedule make_schedule(const StepProfile& profile, const HoldFrom& plan, const Simulation& simulation,
                           const std::shared_ptr<OffloadStore>& store = nullptr);

}  // namespace snug::detail
