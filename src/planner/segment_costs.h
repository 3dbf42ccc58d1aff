#pragma once
// What each segment costs: bytes and seconds, forward, backward and again. Internal to planner.

#include "src/planner/segments.h"
#include "src/planner/storage_uses.h"

namespace snug::detail {

/// Fills in all of each segment but its operators, its `made` and where its backward pass begins, which it reads.
void measure_segments(const plan::StepSimulator& simulator, const StorageUses& uses, Segments& segments);

}  // namespace snug::detail
