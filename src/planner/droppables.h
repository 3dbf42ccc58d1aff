#pragma once
// Storages that a plan may drop, with the least that each costs: for lower bounds. Internal to planner.

#include <cstdint>
#include <utility>
#include <vector>

#include "snug/planner.h"

namespace snug::detail {

struct Droppable {
  int storage;
  int64_t bytes;
  double seconds;  ///< that no plan without it undercuts; see bound.cpp
  /// Events, both ends included, in which it may be gone and is there in plain training.
  std::vector<std::pair<int, int>> gaps;
};

/// Those that autograd saves and that can be rebuilt or offloaded, in the order of seconds a byte.
std::vector<Droppable> droppables(const plan::StepSimulator& simulator);

/// Per storage: of the operators that wrote it. One that wrote several of the `saved` storages is shared out among
/// them. Infinity: one of them cannot run again.
std::vector<double> own_seconds(const plan::StepSimulator& simulator, const std::vector<bool>& saved);

/// The least that a storage's way out and back adds to a step: nothing, as streams may be hidden. Infinity without a
/// link.
double least_transfer_seconds(const StepProfile& profile);

}  // namespace snug::detail
