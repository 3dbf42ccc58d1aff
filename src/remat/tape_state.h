#pragma once
// TapeState: what the parts of an OpTape have in common: whom the tape serves, and how far the step is.

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "src/remat/schedule_cursor.h"
#include "src/remat/tape_listener.h"
#include "src/remat/tape_region.h"

namespace snug::detail {

struct TapeState {
  explicit TapeState(std::shared_ptr<const TapeSchedule> schedule) : cursor(std::move(schedule)) {}

  std::string name() const { return region ? region->name : "Rematerialize"; }
  /// Tells the listener that memory allocated by `work` belongs to a replay.
  template <class Work>
  void as_replay(const Work& work) const {
    if (listener != nullptr) {
      listener->before_replay();
    }
    work();
    if (listener != nullptr) {
      listener->after_replay();
    }
  }

  std::recursive_mutex mutex;  // locked around each use of a part; unlocked while an operator of the program runs
  ScheduleCursor cursor;
  std::optional<TapeRegion> region;  // a tape of a region has no schedule and no listener
  TapeListener* listener = nullptr;
  bool verifies = false;     // rebuilt values are compared with the saved values
  bool is_closed = false;    // the forward pass is over
  bool keeps_graph = false;  // the backward pass under way keeps the graph
};

}  // namespace snug::detail
