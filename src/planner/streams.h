#pragma once
// Streamed storages: the events at which transfers out are waited for, and transfers back begin. Rules 10 and 11 of
// simulator.cpp.

#include <vector>

#include "src/planner/simulator.h"

namespace snug::plan {

/// The most streamed storages that may be in transfer out, or in transfer back, at a time.
inline constexpr int kStreamsAtOnce = 2;

/// Events of the transfers, per storage; -1: no event.
struct StreamPlaces {
  std::vector<int> written_by;  ///< the Forward event before which the program waits until the storage is written
  std::vector<int> fetched_at;  ///< the Unpack event at which the storage's transfer back begins
};

/// `replays`: the replays of the plan. `leaves_when_dropped`: per storage, whether its bytes leave when the program
/// drops it.
StreamPlaces place_streams(const Profile& profile, const Stays& plan, const std::vector<Replay>& replays,
                           const std::vector<bool>& leaves_when_dropped);

}  // namespace snug::plan
