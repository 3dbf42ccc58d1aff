#pragma once
// The inner loop of segment_table.cpp, for the instruction set of the processor. Internal to planner.

#include <cstdint>

namespace snug::plan {

/// For each slot: where own + rest + again is less than `best`, the sum becomes `best`, and `choice` the slot's choice.
/// `best` never rises from slot to slot, and no sum is less than `least_sum`. So slots from the first slot on whose
/// `best` is at most `least_sum` need not be looked at.
void take_faster(float* best, uint32_t* choices, const float* rest, const float* again, float own, uint32_t choice,
                 float least_sum, int slots);

}  // namespace snug::plan
