#pragma once
// Placement in numbers: the bytes of a step whose parts are in memory or in files.

#include <algorithm>
#include <cstdint>

#include "snug/step_plan.h"

namespace snug::detail {

/// The bytes of a part of a step in a file, instead of in memory. Zeros: the part cannot leave memory.
struct PartInFile {
  int64_t moved = 0;      ///< not in memory any more
  int64_t beside = 0;     ///< in memory all the time instead: a window, and tensors too small for a file
  int64_t workspace = 0;  ///< in memory during an update instead of the workspace of an update in memory

  bool can_leave() const { return moved > 0; }
  int64_t saved() const { return moved - beside; }

  friend bool operator==(const PartInFile&, const PartInFile&) = default;
};

/// The bytes of a step beside activations and items, by the time in which the bytes are in memory.
struct StepMemory {
  int64_t fixed = 0;      ///< all the time
  int64_t gradients = 0;  ///< during the update, and between micro-batches
  int64_t workspace = 0;  ///< during the update

  int64_t in_update() const { return fixed + gradients + workspace; }
};

/// In a file: each part that `a` or `b` has in a file.
inline Placement outside_in_either(Placement a, Placement b) {
  return {.state = std::max(a.state, b.state), .model = std::max(a.model, b.model)};
}

}  // namespace snug::detail
