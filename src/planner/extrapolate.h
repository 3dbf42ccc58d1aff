#pragma once
// The profile of a micro-batch that has not run, from the profiles of two small micro-batches.

#include <cstdint>
#include <optional>

#include "src/planner/profile.h"

namespace snug::plan {

/// A profile of some items.
struct ProfiledItems {
  const Profile& profile;
  int64_t items;
};

/// Whether both profiles have the same operators, kinds of storages and order of events.
bool is_alike(const Profile& a, const Profile& b);

/// Every number of bytes lies on the line through the two profiles. The line is exact for tensors with at most one
/// dimension of items. Seconds lie on the line, too, but between constant and proportional ones; the host's seconds are
/// the lesser of both. Empty: `small` does
/// not have fewer items than `large`, the profiles have different operators, or memory changes at different moments.
std::optional<Profile> extrapolated(const ProfiledItems& small, const ProfiledItems& large, int64_t items);

}  // namespace snug::plan
