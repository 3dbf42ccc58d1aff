#pragma once
// StatefulOptimizer: an optimizer that names its own state, so that a snapshot of it is plain
// tensors and numbers (and the same bytes for the same state). snug's own optimizers are such;
// torch's are kept as torch's archive. See snug::stateful in snug/io/stateful.h.

#include <cstdint>
#include <functional>

#include <c10/core/ScalarType.h>

#include "snug/core/state.h"

namespace snug {

class StatefulOptimizer {
 public:
  virtual ~StatefulOptimizer() = default;

  /// Everything that step() depends on besides parameters and gradients, learning rates included.
  virtual StateDict state_dict() const = 0;

  /// What of that this process holds, in the very tensors: for who counts bytes.
  virtual StateDict state_here() const { return state_dict(); }

  /// Bytes that the first update will allocate here for the state of parameters that have none yet, if the trained ones
  /// get gradients.
  int64_t state_bytes_to_come() const {
    return state_bytes_to_come_of([](const at::Tensor& parameter) { return parameter.requires_grad(); });
  }
  /// The same, if those get gradients for which `gets_gradient` is true. 0 where that is not known.
  virtual int64_t state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& /*gets_gradient*/) const {
    return 0;
  }

  /// Bytes that an update allocates here, beside that state, and gives back.
  virtual int64_t workspace_bytes() const { return 0; }

  /// Whether step() updates parameters of this type without losing small updates to rounding. FP32 and FP64; 16-bit
  /// types only with masters of its own, or rounding at random.
  virtual bool takes(c10::ScalarType dtype) const {
    return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double;
  }

  /// Whether step() changes nothing until it has all that it needs, and is called where a gradient scaler skips as well
  /// (see GradientScalingAware). Then the next step(), and only that, calls `hook` at that moment; where it throws, the
  /// step is not made. An optimizer over several ranks says nothing to the others about that step: where one of them
  /// fails, `hook` throws on the others. An empty `hook` takes it back.
  virtual bool before_writing(std::function<void()> /*hook*/) { return false; }

  /// Takes back what state_dict() gave. Throws CorruptFile where it does not fit; then nothing has
  /// changed.
  virtual void load_state_dict(const StateDict& state) = 0;
};

}  // namespace snug
