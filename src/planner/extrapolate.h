#pragma once
// The profile of a large micro-batch from those of two small ones, where that one cannot run.

#include <cstdint>
#include <optional>

#include "snug/profile.h"

namespace snug::detail {

/// A profile of some items.
struct ProfiledItems {
  const StepProfile& profile;
  int64_t items;
};

/// Every number of bytes and of seconds goes on along the line through the two profiles, which is exact where tensors
/// have a dimension of items or none. None: the two ran other operators, or memory changed at other moments.
std::optional<StepProfile> extrapolated(const ProfiledItems& small, const ProfiledItems& large, int64_t items);

}  // namespace snug::detail
