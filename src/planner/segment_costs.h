#pragma once
// The cost of each segment: bytes and seconds, forward, backward and again. Internal to planner.

#include "src/planner/segments.h"
#include "src/planner/storage_uses.h"

namespace snug::plan {

/// Reads the operators, `made` and `backward_begin` of each segment, and fills in all other fields.
void measure_segments(const Simulator& simulator, const StorageUses& uses, Segments& segments);

}  // namespace snug::plan
