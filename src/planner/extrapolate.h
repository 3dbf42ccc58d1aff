#pragma once
// The profile of a micro-batch that has not run, from the profiles of two small micro-batches; and what two profiles of
// one step have in common.

#include <cstdint>
#include <optional>
#include <vector>

#include "src/planner/profile.h"

namespace snug::plan {

/// A profile of some items.
struct ProfiledItems {
  const Profile& profile;
  int64_t items;
};

/// For profiles of one step that differ in bytes and seconds: for each event of `from`, the number of the event of `to`
/// in the same place. A change of memory has the place of the next event of another kind, because memory may rise
/// between two events in one profile and fall in the other. Empty: the profiles are not of one step.
std::optional<std::vector<int>> same_places(const Profile& from, const Profile& to);

/// Takes the least of each operator's times over two runs of a step. No effect if the runs have other operators.
void take_least_times(Profile& profile, const Profile& other);

/// Other work of the machine may make a time many times as long. Where a time of `profile` is more than twice the time
/// that `foreseen` tells for the same items, the foreseen time takes its place. No effect in two cases: operators or
/// bytes of storages differ, so the step does other work than foreseen; or more than half of the operators take more
/// than twice as long, so the foreseen times are wrong.
void limit_times(Profile& profile, const Profile& foreseen);

/// Every number of bytes lies on the line through the two profiles. The line is exact for tensors with at most one
/// dimension of items. Seconds lie on the line, too, but between constant and proportional ones, where the seconds of
/// `large` are at most twice as long as in proportion to the seconds of `small`; the seconds of host and tape are the
/// lesser of both. Empty: `small` does not have fewer items than `large`, the profiles have different
/// operators, or memory changes at different moments.
std::optional<Profile> extrapolated(const ProfiledItems& small, const ProfiledItems& large, int64_t items);

}  // namespace snug::plan
