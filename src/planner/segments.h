#pragma once
// A step cut into segments of operators, for any graph: the cuts, and the cost of each segment. Internal to planner.

#include <cstdint>
#include <vector>

#include "src/planner/simulator.h"
#include "src/planner/storage_uses.h"

namespace snug::plan {

/// A choice of storages to keep so that the backward pass of a segment finds everything it needs. Levels are in bytes.
struct SegmentOption {
  /// Saved storages of the segment that are dropped, and rebuilt when the segment's backward pass begins.
  std::vector<int> dropped = {};
  /// Saved storages of the segment that stay.
  std::vector<int> kept = {};
  /// Time to rebuild `dropped`.
  double seconds = 0;
  /// The rebuild reads storages of earlier segments that the backward pass never asks for.
  bool needs_unsaved_inputs = false;
  /// Highest level while the segment runs in the forward pass. Droppable storages of other segments are not counted.
  int64_t first_peak = 0;
  /// Highest level of the segment's own storages while it runs again.
  int64_t again_peak = 0;
};

/// Operators that follow each other, with the costs of the table.
struct Segment {
  int first = 0;  ///< first and last operator, both included
  int last = 0;
  /// The event in which the segment's backward pass begins.
  int backward_begin = 0;
  /// Droppable storages whose last writer is an operator of the segment.
  std::vector<int> made = {};
  /// Time to run the segment's operators again, without operators that no backward pass needs.
  double seconds = 0;
  /// As the peaks of an option that keeps nothing.
  int64_t first_peak = 0;
  int64_t again_peak = 0;
  /// Level of all storages that are not droppable, and of the backward pass's own bytes, when the segment's backward
  /// pass begins.
  int64_t backward_base = 0;
  /// Highest level during the segment's backward pass. Droppable storages of earlier segments are not counted.
  int64_t backward_peak = 0;
  std::vector<SegmentOption> options = {};
};

/// All segments of a step, with facts about storages that the table reads.
struct Segments {
  std::vector<Segment> list = {};
  std::vector<bool> saved = {};                  ///< as in StorageUses
  std::vector<bool> droppable = {};              ///< as in StorageUses
  std::vector<std::vector<int>> consumers = {};  ///< per storage: segments that read the storage, ascending
  std::vector<int64_t> sizes = {};               ///< per storage, in bytes
  int64_t plain_peak = 0;
  int backward = 0;  ///< the event after the last operator

  int count() const { return static_cast<int>(list.size()); }
  int64_t bytes(int storage) const { return sizes[static_cast<size_t>(storage)]; }

  /// Raises the peak estimates of the segment that runs during `event`, forward or backward, by `bytes`.
  void raise(const Profile& profile, int event, int64_t bytes);
};

/// At most `most` segments, of about equal weight, cut where few bytes cross. Empty for a profile without operators.
Segments cut_into_segments(const Simulator& simulator, const StorageUses& uses, int most);

}  // namespace snug::plan
