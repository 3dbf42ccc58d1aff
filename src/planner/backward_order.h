#pragma once
// When the backward pass comes to each operator: a guess from the storages that the backward pass asks for. Internal to
// planner.

#include <vector>

#include "src/planner/storage_uses.h"

namespace snug::plan {

/// Per operator: the event of an Unpack that is probably for the operator; StorageUses::kNone if no such Unpack was
/// found. The later an operator, the earlier the operator's event.
std::vector<int> backward_events(const Profile& profile, const StorageUses& uses);

}  // namespace snug::plan
