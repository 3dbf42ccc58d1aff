#pragma once
// The profile of a large micro-batch that cannot run, from the profiles of two small micro-batches.

#include <cstdint>
#include <optional>

#include "src/planner/profile.h"

namespace snug::plan {

/// A profile of some items.
struct ProfiledItems {
  const Profile& profile;
  int64_t items;
};

/// Every number of bytes and of seconds lies on the line through the two profiles. The line is exact for tensors with
/// at most one dimension of items. Empty: `small` does not have fewer items than `large`, the profiles have different
/// operators, or memory changes at different moments.
std::optional<Profile> extrapolated(const ProfiledItems& small, const ProfiledItems& large, int64_t items);

}  // namespace snug::plan
