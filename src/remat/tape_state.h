#pragma once
// TapeState: what the parts of an OpTape have in common: whom the tape serves, and how far the step is.

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "snug/checkpoint.h"
#include "src/memory/saved_tensor_policy.h"
#include "src/remat/schedule_cursor.h"
#include "src/remat/tape_listener.h"

namespace snug::detail {

/// What a checkpointed region asks of its OpTape. tape_region.cpp says how the tape serves a region.
struct TapeRegion {
  std::string name;                                      // in errors
  CheckpointPolicy policy = {};                          // empty: no result is kept
  std::shared_ptr<SavedTensorPolicy> outside = nullptr;  // keeps tensors from outside of the region; null: the tape
};

struct TapeState {
  explicit TapeState(std::shared_ptr<const TapeSchedule> schedule) : cursor(std::move(schedule)) {}

  std::string name() const { return region ? region->name : "Rematerialize"; }
  bool has_listener() const { return listener != &nobody; }
  /// Tells the listener that memory allocated by `work` belongs to a replay.
  template <class Work>
  void as_replay(const Work& work) const {
    listener->before_replay();
    const auto after = c10::make_scope_exit([this] { listener->after_replay(); });
    work();
  }

  // Locked around each use of a part that may meet another thread; unlocked while an operator of the program runs.
  // TapeStorages locks the mutex itself when a program's memory is released.
  std::recursive_mutex mutex;
  ScheduleCursor cursor;
  std::optional<TapeRegion> region;  // a tape of a region has no schedule and no listener
  TapeListener nobody;
  TapeListener* listener = &nobody;
  bool verifies = false;     // rebuilt values are compared with the saved values
  bool is_closed = false;    // the forward pass is over
  bool keeps_graph = false;  // the backward pass under way keeps the graph
};

}  // namespace snug::detail
