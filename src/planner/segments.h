#pragma once
// A step cut into segments of operators, for any graph: where to cut, and what each segment costs. Internal to planner.

#include <cstdint>
#include <vector>

#include "snug/planner.h"
#include "src/planner/storage_uses.h"

namespace snug::detail {

/// One way to run a segment so that its backward pass finds all that it needs. Levels are in bytes.
struct SegmentOption {
  /// Saved storages of the segment that leave, and are rebuilt when its backward pass begins.
  std::vector<int> dropped = {};
  /// Saved storages of the segment that stay.
  std::vector<int> kept = {};
  /// To rebuild `dropped`.
  double seconds = 0;
  /// The rebuild reads storages of earlier segments that the backward pass never asks for.
  bool needs_unsaved_inputs = false;
  /// Highest level while the segment runs in the forward pass. Droppable storages of other segments are not counted.
  int64_t first_peak = 0;
  /// Highest level of the segment's own storages while it runs again.
  int64_t again_peak = 0;
};

struct Segment {
  int first = 0;  ///< operators, both included
  int last = 0;
  /// The event in which its backward pass begins.
  int backward_begin = 0;
  /// Droppable storages that its operators write last.
  std::vector<int> made = {};
  /// To run it again, as far as a backward pass needs it.
  double seconds = 0;
  /// As of an option that keeps nothing.
  int64_t first_peak = 0;
  int64_t again_peak = 0;
  /// Level of all storages that are not droppable, and of the backward pass's own bytes, when its backward pass begins.
  int64_t backward_base = 0;
  /// Highest level during its backward pass. Droppable storages of earlier segments are not counted.
  int64_t backward_peak = 0;
  std::vector<SegmentOption> options = {};
};

struct Segments {
  std::vector<Segment> list = {};
  std::vector<bool> saved = {};                  ///< as in StorageUses
  std::vector<bool> droppable = {};              ///< likewise
  std::vector<std::vector<int>> consumers = {};  ///< per storage: segments that read it, ascending
  std::vector<int64_t> sizes = {};               ///< per storage, in bytes
  int64_t plain_peak = 0;
  int backward = 0;  ///< the event after the last operator

  int count() const { return static_cast<int>(list.size()); }
  int64_t bytes(int storage) const { return sizes[static_cast<size_t>(storage)]; }

  /// Raises the estimate for the segment that is under way in `event`.
  void raise(const StepProfile& profile, int event, int64_t bytes);
};

/// At most so many segments, of about equal weight, cut where few bytes cross. Empty for a profile without operators.
Segments cut_into_segments(const plan::StepSimulator& simulator, const StorageUses& uses, int most);

}  // namespace snug::detail
