#pragma once
// The inner loop of segment_table.cpp, for the instruction set of the processor. Internal to planner.

#include <cstdint>

namespace snug::plan {

/// For each slot: where own + rest + again is less than `best`, the sum becomes `best`, and `choice` the slot's choice.
void take_faster(float* best, uint32_t* choices, const float* rest, const float* again, float own, uint32_t choice,
                 int slots);

}  // namespace snug::plan
