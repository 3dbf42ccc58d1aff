#pragma once
// Storages that a plan may drop, with the least cost of each: for lower bounds. Internal to planner.

#include <cstdint>
#include <utility>
#include <vector>

#include "src/planner/simulator.h"

namespace snug::plan {

/// A storage that a plan may drop.
struct Droppable {
  int storage;
  int64_t bytes;
  double seconds;  ///< no plan that drops the storage adds fewer; see bound.cpp
  /// Events, both ends included, during which the storage may be absent, but is in memory in plain training.
  std::vector<std::pair<int, int>> gaps;
};

/// The storages that autograd saves and a plan can rebuild or offload, by ascending seconds for each byte.
std::vector<Droppable> droppables(const Simulator& simulator);

/// Per storage: seconds of the operators that wrote the storage. The seconds of an operator that wrote several of the
/// `saved` storages are shared out among the storages. Infinity: an operator cannot run again, or the storage must not
/// be rebuilt.
std::vector<double> own_seconds(const Simulator& simulator, const std::vector<bool>& saved);

/// The least time that the transfers of a storage, out and back, add to a step: 0, because computation may hide
/// streams. Infinity without a link.
double least_transfer_seconds(const Profile& profile);

}  // namespace snug::plan
