#pragma once
// GradientScalingAware: the interface between a gradient scaler and an optimizer, which otherwise do not know each
// other. An optimizer that implements it unscales and skips on the device, inside its own pass over the parameters, so
// that no step waits for the host.
//
// StatefulOptimizer: an optimizer that names its own state. Its snapshot consists of plain tensors and numbers, and the
// same state gives the same bytes. snug's own optimizers implement it; the state of torch's optimizers is stored as
// torch's archive. See snug::stateful in include/snug/snapshot.h.

#include <cstdint>
#include <filesystem>
#include <functional>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "snug/core.h"
#include "snug/state.h"

namespace snug {

class GradientScalingAware {
 public:
  virtual ~GradientScalingAware() = default;

  /// Applies to the next step() only.
  /// - `grad_scale`: FP32 scalar tensor. The step divides the gradients by it. Undefined if they are unscaled already.
  /// - `found_inf`: FP32 scalar tensor. If it is 1, the step changes neither parameters nor state.
  virtual void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) = 0;
};

/// A place for an optimizer's state outside of memory.
struct StateFile {
  /// On a disk; a relative path is that of the call that it is given to; empty: the system's temporary directory, which
  /// on many systems is itself memory. The file has no name, so it disappears with the process: what is to survive
  /// belongs into a snapshot.
  std::filesystem::path directory = {};
  /// Tensor memory through which an update streams the state, in three parts: one is computed while another is read
  /// and the third is written. More only where a parameter must stay whole whose state is larger than a third of this.
  Bytes window = Bytes(24 << 20);
};

/// What an optimizer takes with its state in a file.
struct StateFileBytes {
  int64_t moved = 0;      ///< of the state of all parameters that are trained, there or to come: not in memory then
  int64_t workspace = 0;  ///< that an update allocates in this process and frees again, the window included

  friend bool operator==(const StateFileBytes&, const StateFileBytes&) = default;
};

class StatefulOptimizer {
 public:
  virtual ~StatefulOptimizer() = default;

  /// Everything that step() depends on besides parameters and gradients, learning rates included. As in Python, tensors
  /// are those of the state itself, which the next step changes, and numbers are those of now: save it at once, or
  /// clone the tensors, to keep what it says.
  virtual StateDict state_dict() const = 0;

  /// The part of state_dict() that this process holds, as the very tensors and not as copies: for counting bytes.
  virtual StateDict state_here() const { return state_dict(); }

  /// Bytes that the first update will allocate in this process, for the state of parameters that have none yet, if all
  /// trained parameters get gradients.
  int64_t state_bytes_to_come() const {
    return state_bytes_to_come_of([](const at::Tensor& parameter) { return parameter.requires_grad(); });
  }
  /// The same, if the parameters for which `gets_gradient` is true get gradients. 0 if the number is not known.
  virtual int64_t state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& /*gets_gradient*/) const {
    return 0;
  }
  /// Whether the number is known. If it is not, and before_writing() returns false, a Stepper makes the update without
  /// the limit of its memory_budget: one that ran out of memory midway would leave some parameters updated. The next
  /// step plans with the state that is there by then.
  virtual bool knows_state_to_come() const { return true; }

  /// Bytes that an update allocates in this process beside that state, and frees again, with the state in memory.
  virtual int64_t workspace_bytes() const { return 0; }

  /// Whether step() updates parameters of this type without losing small updates to rounding. True for FP32 and FP64.
  /// True for 16-bit types only if the optimizer keeps master weights or rounds at random.
  virtual bool takes(c10::ScalarType dtype) const {
    return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double;
  }

  /// Returns true if this optimizer's step() allocates everything that it needs before its first write, and is also
  /// called for steps that a gradient scaler skips (see GradientScalingAware). Then:
  /// - the next step(), and only that one, calls `hook` just before its first write. If `hook` throws, the step is not
  ///   made;
  /// - an optimizer over several ranks does not tell the other ranks whether that step failed. If one of them fails,
  ///   `hook` throws on the others;
  /// - an empty `hook` cancels an earlier one.
  virtual bool before_writing(std::function<void()> /*hook*/) { return false; }

  /// Moves the state to a file, and keeps it there from now on: step() has the same bits, and takes memory only for the
  /// window. Returns false, and does nothing, if this optimizer keeps its state in memory only.
  virtual bool keep_state_in(const StateFile& /*file*/) { return false; }
  /// Moves it back.
  virtual void keep_state_in_memory() {}
  virtual bool is_state_in_file() const { return false; }
  /// What keep_state_in() would change, or has changed. Zeros: nothing.
  virtual StateFileBytes bytes_with_state_in(const StateFile& /*file*/) const { return {}; }

  /// Restores a state that state_dict() returned, by a copy. Throws CorruptFile if it does not fit; then nothing has
  /// changed.
  virtual void load_state_dict(const StateDict& state) = 0;
};

}  // namespace snug
