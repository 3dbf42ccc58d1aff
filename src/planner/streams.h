#pragma once
// Where the transfers of streamed storages are waited for, and where they begin: rules 10 and 11 of simulator.cpp.

#include <vector>

#include "snug/planner.h"

namespace snug::detail {

/// How many streamed storages may be on their way out, or on their way back, at a time.
inline constexpr int kStreamsAtOnce = 2;

/// Per storage; -1: nowhere.
struct StreamPlaces {
  std::vector<int> written_by;  ///< the Forward event before which the program waits until the storage is written
  std::vector<int> fetched_at;  ///< the Unpack event at which its way back begins
};

/// `replays`: those of the plan. `leaves_when_dropped`: per storage, whether its bytes leave when the program drops it.
StreamPlaces place_streams(const StepProfile& profile, const plan::Stays& plan,
                           const std::vector<plan::Replay>& replays, const std::vector<bool>& leaves_when_dropped);

}  // namespace snug::detail
