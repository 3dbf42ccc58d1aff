#pragma once
// A step cut into segments of operators, for any graph: where to cut, and what each segment costs. Internal to planner.

#include <cstdint>
#include <vector>

#include "snug/planner/simulator.h"

namespace snug::detail {

/// One way to run a segment so that its backward pass finds what it needs.
struct SegmentOption {
  std::vector<int> dropped =
      {};                      ///< storages that plain training saves; rebuilt when the segment's backward pass begins
  std::vector<int> kept = {};  ///< the other ones that it saves
  double seconds = 0;          ///< to rebuild `dropped`
  bool needs_unsaved_inputs = false;  ///< likewise: of segments before, and not asked for by the backward pass
  int64_t first_peak =
      0;  ///< highest level while the segment runs for the first time, but for droppable storages of segments before
  int64_t again_peak = 0;  ///< likewise when it runs again, of what it makes
};

struct Segment {
  int first = 0;  ///< operators, both included
  int last = 0;
  int begin = 0;               ///< event in which its backward pass begins
  std::vector<int> made = {};  ///< droppable storages
  double seconds = 0;          ///< to run it again, as far as a backward pass needs it
  int64_t first_peak = 0;      ///< as of an option, if nothing is kept
  int64_t again_peak = 0;
  int64_t backward_base = 0;  ///< level of all that is not droppable, when its backward pass begins
  int64_t backward_peak = 0;  ///< highest during its backward pass, but for droppable storages of segments before
  std::vector<SegmentOption> options = {};
};

struct Segments {
  std::vector<Segment> list = {};
  std::vector<bool> droppable = {};              ///< per storage: can be made again, and nobody holds it until backward
  std::vector<bool> saved = {};                  ///< per storage: asked for by the backward pass
  std::vector<std::vector<int>> consumers = {};  ///< per storage: segments that read it, ascending
  std::vector<int64_t> sizes = {};               ///< per storage, in bytes
  int64_t plain_peak = 0;

  int64_t bytes(int storage) const { return sizes[static_cast<size_t>(storage)]; }
  int backward = 0;  ///< the event after the last operator

  int count() const { return static_cast<int>(list.size()); }

  /// Raises the estimate for the segment that is under way in `event`.
  void raise(const StepProfile& profile, int event, int64_t bytes);
};

/// At most so many segments; of about equal weight, cut where few bytes cross. Empty for a profile without operators.
Segments cut_into_segments(const plan::StepSimulator& simulator, int most);

}  // namespace snug::detail
