#include "src/planner/extrapolate.h"

#include <algorithm>

// The profile of a large micro-batch is expensive, and impossible where the micro-batch runs within a budget under no
// plan. A plan may be searched, and a refusal must name bytes, without the profile (step/step_trials.cpp). Small parts
// of the batch are cheap, and have profiles.
//
// The profile of the large micro-batch is the continuation of a line through two such profiles. Bytes of a tensor with
// a single dimension of items, or none, lie on the line exactly. Bytes of other tensors, for example of all pairs of
// items, do not: the line underestimates them. Times are measured, and noise between two short times becomes large far
// from both. So a time is at least that of an operator whose time does not depend on the items, and at most that of an
// operator whose time is proportional to the items; for fewer items the other way round. Each time is measured in one
// run or two, and a busy machine may stop the process in any operator. So a time counts as disturbed if it is more than
// twice as long as the other profile allows.
//
// The host calls the same operators, however many the items. So the times of host and tape stay the same.
//
// Profiles that differ in operators, kinds of storages or the order of events have no line between them. Then no
// profile is made, and the refusal names no number.

namespace snug::plan {

namespace {

constexpr double kDisturbed = 2;

bool changes_memory(const Event& event) {
  return event.kind == EventKind::Allocate || event.kind == EventKind::Release;
}

bool is_same_event(const Event& x, const Event& y) { return x.kind == y.kind && x.index == y.index; }

// Whether both profiles have the same operators and kinds of storages.
bool is_alike(const Profile& a, const Profile& b) {
  const auto same_operator = [](const Operator& x, const Operator& y) {
    return x.name == y.name && x.reads == y.reads && x.writes == y.writes && x.replayable == y.replayable;
  };
  const auto same_storage = [](const Storage& x, const Storage& y) { return x.kind == y.kind; };
  return a.device == b.device && a.backward.size() == b.backward.size() &&
         std::ranges::equal(a.operators, b.operators, same_operator) &&
         std::ranges::equal(a.storages, b.storages, same_storage);
}

}  // namespace

std::optional<std::vector<int>> same_places(const Profile& from, const Profile& to) {
  if (!is_alike(from, to)) {
    return std::nullopt;
  }
  std::vector<int> places;
  auto there = to.events.begin();
  for (const Event& event : from.events) {
    there = std::find_if_not(there, to.events.end(), changes_memory);
    places.push_back(static_cast<int>(there - to.events.begin()));
    if (!changes_memory(event) && (there == to.events.end() || !is_same_event(event, *there++))) {
      return std::nullopt;
    }
  }
  return std::all_of(there, to.events.end(), changes_memory) ? std::optional(places) : std::nullopt;
}

void take_least_times(Profile& profile, const Profile& other) {
  if (profile.operators.size() != other.operators.size() || profile.backward.size() != other.backward.size()) {
    return;
  }
  const auto take = [](auto& ones, const auto& others) {
    for (size_t i = 0; i < ones.size(); ++i) {
      ones[i].seconds = std::min(ones[i].seconds, others[i].seconds);
    }
  };
  take(profile.operators, other.operators);
  take(profile.backward, other.backward);
  profile.host_seconds = std::min(profile.host_seconds, other.host_seconds);
  profile.tape_seconds = std::min(profile.tape_seconds, other.tape_seconds);
}

void limit_times(Profile& profile, const Profile& foreseen) {
  const auto same_bytes = [](const Storage& x, const Storage& y) { return x.bytes == y.bytes; };
  if (!is_alike(profile, foreseen) || !std::ranges::equal(profile.storages, foreseen.storages, same_bytes)) {
    return;
  }
  const auto is_disturbed = [](double seconds, double of_foreseen) {
    return seconds > kDisturbed * of_foreseen && of_foreseen > 0;
  };
  size_t disturbed = 0;
  for (size_t i = 0; i < profile.operators.size(); ++i) {
    disturbed += is_disturbed(profile.operators[i].seconds, foreseen.operators[i].seconds) ? 1 : 0;
  }
  if (2 * disturbed > profile.operators.size()) {
    return;
  }
  const auto limit = [&](double& seconds, double of_foreseen) {
    seconds = is_disturbed(seconds, of_foreseen) ? of_foreseen : seconds;
  };
  for (size_t i = 0; i < profile.operators.size(); ++i) {
    limit(profile.operators[i].seconds, foreseen.operators[i].seconds);
  }
  for (size_t i = 0; i < profile.backward.size(); ++i) {
    limit(profile.backward[i].seconds, foreseen.backward[i].seconds);
  }
  limit(profile.host_seconds, foreseen.host_seconds);
  limit(profile.tape_seconds, foreseen.tape_seconds);
}

std::optional<Profile> extrapolated(const ProfiledItems& small, const ProfiledItems& large, int64_t items) {
  if (small.items >= large.items || !is_alike(small.profile, large.profile) ||
      !std::ranges::equal(small.profile.events, large.profile.events, is_same_event)) {
    return std::nullopt;
  }
  const int64_t between = large.items - small.items, beyond = items - large.items;
  const auto bytes = [&](int64_t of_small, int64_t of_large) {
    return std::max<int64_t>(0, of_large + (of_large - of_small) * beyond / between);
  };
  const auto seconds = [&](double of_small, double of_large) {
    const double in_proportion = of_small * static_cast<double>(large.items) / static_cast<double>(small.items);
    of_large = of_small > 0 ? std::min(of_large, kDisturbed * in_proportion) : of_large;
    const double same_pace = of_large * static_cast<double>(items) / static_cast<double>(large.items);
    const double on_line =
        of_large + (of_large - of_small) * static_cast<double>(beyond) / static_cast<double>(between);
    return std::clamp(on_line, std::min(of_large, same_pace), std::max(of_large, same_pace));
  };
  Profile result = large.profile;
  for (size_t i = 0; i < result.storages.size(); ++i) {
    result.storages[i].bytes = bytes(small.profile.storages[i].bytes, result.storages[i].bytes);
  }
  for (size_t i = 0; i < result.operators.size(); ++i) {
    result.operators[i].workspace = bytes(small.profile.operators[i].workspace, result.operators[i].workspace);
    result.operators[i].seconds = seconds(small.profile.operators[i].seconds, result.operators[i].seconds);
  }
  result.host_seconds = std::min(small.profile.host_seconds, result.host_seconds);
  result.tape_seconds = std::min(small.profile.tape_seconds, result.tape_seconds);
  for (size_t i = 0; i < result.backward.size(); ++i) {
    result.backward[i].seconds = seconds(small.profile.backward[i].seconds, result.backward[i].seconds);
  }
  // Levels lie on the line, not the differences between levels: differences are rounded, and do not add up to a level.
  int64_t of_small = 0, of_large = 0, level = 0;
  for (size_t i = 0; i < result.events.size(); ++i) {
    Event& event = result.events[i];
    if (changes_memory(event)) {
      const int64_t sign = event.kind == EventKind::Allocate ? 1 : -1;
      of_small += sign * small.profile.events[i].bytes;
      of_large += sign * event.bytes;
      event.bytes = std::max<int64_t>(0, sign * (bytes(of_small, of_large) - level));
      level += sign * event.bytes;
    }
  }
  return result;
}

}  // namespace snug::plan
