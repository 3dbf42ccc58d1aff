#include "src/planner/streams.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/planner/at.h"

namespace snug::plan {
namespace {

// The times at which events begin if the program waits for no stream.
std::vector<double> begin_times(const Profile& profile, const Stays& plan, const std::vector<Replay>& replays,
                                const std::vector<bool>& leaves_when_dropped) {
  std::vector<double> begins;
  begins.reserve(profile.events.size());
  double now = 0;
  auto replay = replays.begin();
  for (size_t e = 0; e < profile.events.size(); ++e) {
    begins.push_back(now);
    const Event& event = profile.events[e];
    const int i = event.index;
    if (event.kind == EventKind::Forward) {
      now += profile.operators[at(i)].seconds;
    } else if (event.kind == EventKind::Backward) {
      now += profile.backward[at(i)].seconds;
    } else if (event.kind == EventKind::Drop && leaves_when_dropped[at(i)] && plan[at(i)] == Stay::offloaded()) {
      now += profile.link.out_seconds(profile.storages[at(i)].bytes);
    } else if (event.kind == EventKind::Unpack && replay != replays.end() && at(replay->event) == e) {
      for (const int s : replay->loads) {
        now += plan[at(s)] == Stay::offloaded() ? profile.link.back_seconds(profile.storages[at(s)].bytes) : 0;
      }
      for (const int op : replay->operators) {
        now += profile.operators[at(op)].seconds;
      }
      ++replay;
    }
  }
  return begins;
}

std::vector<int> unpackings_of(const Profile& profile) {
  std::vector<int> unpackings;
  for (size_t e = 0; e < profile.events.size(); ++e) {
    const Event& event = profile.events[e];
    if (event.kind == EventKind::Unpack && profile.storages[at(event.index)].kind != StorageKind::External) {
      unpackings.push_back(static_cast<int>(e));
    }
  }
  return unpackings;
}

bool is_operator(const Profile& profile, size_t event) {
  const Event& e = profile.events[event];
  return e.kind == EventKind::Forward && profile.operators[at(e.index)].name != kOtherWrite;
}

}  // namespace

StreamPlaces place_streams(const Profile& profile, const Stays& plan, const std::vector<Replay>& replays,
                           const std::vector<bool>& leaves_when_dropped) {
  StreamPlaces places{std::vector<int>(plan.size(), -1), std::vector<int>(plan.size(), -1)};
  const std::vector<double> begins = begin_times(profile, plan, replays, leaves_when_dropped);
  const std::vector<int> unpackings = unpackings_of(profile);
  const size_t forward = unpackings.empty() ? profile.events.size() : at(unpackings.front());

  double written = 0;
  size_t by = 0;
  for (size_t e = 0; e < forward; ++e) {
    const int s = profile.events[e].index;
    if (profile.events[e].kind != EventKind::Drop || plan[at(s)] != Stay::streamed() || !leaves_when_dropped[at(s)]) {
      continue;
    }
    written = std::max(written, begins[e]) + profile.link.out_seconds(profile.storages[at(s)].bytes);
    by = std::max(by, e);
    while (by < forward && !(is_operator(profile, by) && begins[by] >= written)) {
      ++by;
    }
    places.written_by[at(s)] = by < forward ? static_cast<int>(by) : -1;
  }

  std::vector<std::pair<int, int>> loads;  // a storage, and the event that needs the storage
  for (const Replay& replay : replays) {
    for (const int s : replay.loads) {
      if (plan[at(s)] == Stay::streamed()) {
        loads.emplace_back(s, replay.event);
      }
    }
  }
  double next_begins = std::numeric_limits<double>::infinity();
  for (size_t i = loads.size(); i-- > 0;) {
    const auto [s, needed] = loads[i];
    const double latest =
        std::min(begins[at(needed)], next_begins) - profile.link.back_seconds(profile.storages[at(s)].bytes);
    const int earliest = i < kStreamsAtOnce ? unpackings.front() : loads[i - kStreamsAtOnce].second;
    const auto end = std::lower_bound(unpackings.begin(), unpackings.end(), needed);
    auto found = std::partition_point(unpackings.begin(), end, [&](int event) { return begins[at(event)] <= latest; });
    found -= found == unpackings.begin() ? 0 : 1;
    const int fetched_at = std::max(*found, earliest);
    places.fetched_at[at(s)] = fetched_at < needed ? fetched_at : -1;
    next_begins = std::max(latest, begins[at(fetched_at)]);
  }
  return places;
}

}  // namespace snug::plan
