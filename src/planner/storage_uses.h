#pragma once
// StorageUses: the operators that write and read each storage of a step, and the storages that a plan may drop.
// Internal to planner.

#include <vector>

#include "src/planner/simulator.h"

namespace snug::plan {

/// Facts about the storages of a step that do not depend on a plan.
struct StorageUses {
  static constexpr int kNone = -1;

  explicit StorageUses(const Simulator& simulator);

  /// The last operator that writes or reads the storage; kNone if no operator does.
  int last_user(int storage) const;

  std::vector<int> first_writer, last_writer;  ///< per storage: operators, or kNone
  std::vector<std::vector<int>> readers;       ///< per storage: operators, ascending; a write in place reads, too
  /// Per storage: the event in which the program lets go of the storage; the number of events if never.
  std::vector<int> dropped_at;
  /// Per storage: the event in which backward first asks for the storage; the number of events if never.
  std::vector<int> unpacked_at;
  std::vector<bool> may_leave;  ///< per storage: a plan may offload the storage
  std::vector<bool> saved;      ///< per storage: the backward pass asks for the storage
  /// Per storage: can be made again, and the program lets go of the storage before the backward pass.
  std::vector<bool> droppable;
  int backward = 0;  ///< the event after the last operator

 private:
  void find_writers_and_readers(const Simulator& simulator);
  void find_events(const Profile& profile);
  void find_droppable(const Simulator& simulator);
};

}  // namespace snug::plan
