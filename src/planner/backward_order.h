#pragma once
// When the backward pass comes to each operator, guessed from what it asks for. Internal to planner.

#include <vector>

#include "src/planner/storage_uses.h"

namespace snug::detail {

/// Per operator: the event of an Unpack that is its own; StorageUses::kNone where none is known. The later an operator,
/// the earlier its event.
std::vector<int> backward_events(const StepProfile& profile, const StorageUses& uses);

}  // namespace snug::detail
