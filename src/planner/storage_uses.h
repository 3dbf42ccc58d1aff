#pragma once
// StorageUses: which operators write and read each storage of a step, and which storages a plan may drop. Internal to
// planner.

#include <vector>

#include "snug/planner.h"

namespace snug::detail {

struct StorageUses {
  static constexpr int kNone = -1;

  explicit StorageUses(const plan::StepSimulator& simulator);

  /// The last operator that writes or reads it; kNone.
  int last_user(int storage) const;

  std::vector<int> first_writer, last_writer;  ///< per storage: operators, or kNone
  std::vector<std::vector<int>> readers;       ///< per storage: operators, ascending; a write in place reads, too
  std::vector<int> dropped_at;   ///< per storage: the event in which the program lets go of it; or the number of events
  std::vector<int> unpacked_at;  ///< likewise: in which backward asks for it first
  std::vector<bool> may_leave;   ///< per storage: a plan may offload it
  std::vector<bool> saved;       ///< per storage: asked for by the backward pass
  std::vector<bool>
      droppable;     ///< per storage: it can be made again, and the program has no hold on it in the backward pass
  int backward = 0;  ///< the event after the last operator

 private:
  void find_writers_and_readers(const plan::StepSimulator& simulator);
  void find_events(const StepProfile& profile);
  void find_droppable(const plan::StepSimulator& simulator);
};

}  // namespace snug::detail
