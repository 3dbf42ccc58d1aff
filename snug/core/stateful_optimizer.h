#pragma once
// StatefulOptimizer: an optimizer that names its own state, so that a snapshot of it is plain
// tensors and numbers (and the same bytes for the same state). snug's own optimizers are such;
// torch's are kept as torch's archive. See snug::stateful in snug/io/stateful.h.

#include "snug/core/state.h"

namespace snug {

class StatefulOptimizer {
 public:
  virtual ~StatefulOptimizer() = default;

  /// Everything that step() depends on besides parameters and gradients, learning rates included.
  virtual StateDict state_dict() const = 0;

  /// What of that this process holds, in the very tensors: for who counts bytes.
  virtual StateDict state_here() const { return state_dict(); }

  /// Takes back what state_dict() gave. Throws CorruptFile where it does not fit; then nothing has
  /// changed.
  virtual void load_state_dict(const StateDict& state) = 0;
};

}  // namespace snug
