#pragma once
// GradientScalingAware: the interface between a gradient scaler and an optimizer. Otherwise scaler and optimizer do not
// know each other. An optimizer with this interface unscales and skips on the device, inside the optimizer's own pass
// over the parameters, so no step waits for the host.
//
// StatefulOptimizer: an optimizer that names its own state. A snapshot of the optimizer consists of plain tensors and
// numbers, and the same state gives the same bytes. snug's own optimizers are StatefulOptimizers. The state of torch's
// optimizers is stored as torch's archive. See snug::stateful in include/snug/snapshot.h.

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
  /// - `grad_scale`: FP32 scalar tensor. The step divides the gradients by `grad_scale`. Undefined if the gradients are
  ///   unscaled already.
  /// - `found_inf`: FP32 scalar tensor. If the value is 1, the step changes neither parameters nor state.
  virtual void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) = 0;
};

/// A file for an optimizer's state, outside of memory.
struct StateFile {
  /// A folder on a disk. Empty: the system's temporary directory, which on many systems is itself memory. A relative
  /// path starts at the program's directory at the time of the call that gets the StateFile. The file has no name, so
  /// the file disappears with the process: state that must survive belongs in a snapshot.
  std::filesystem::path directory = {};
  /// Tensor memory through which an update streams the state, in three parts: while one part is computed, another part
  /// is read and the third is written. An update takes more memory than the window only if a parameter must stay whole
  /// and the parameter's state is larger than a third of the window.
  Bytes window = Bytes(24 << 20);
};

/// Bytes of an optimizer whose state is in a file.
struct StateFileBytes {
  int64_t moved = 0;      ///< the state of all trained parameters, made already or still to be made: not in memory then
  int64_t workspace = 0;  ///< memory that an update allocates in this process and frees again, the window included

  friend bool operator==(const StateFileBytes&, const StateFileBytes&) = default;
};

class StatefulOptimizer {
 public:
  virtual ~StatefulOptimizer() = default;

  /// Everything that step() depends on besides parameters and gradients, learning rates included. As in Python, the
  /// tensors are the state's own tensors, which the next step changes, and the numbers have the current values. To keep
  /// the current state, save the dictionary at once, or clone the tensors.
  virtual StateDict state_dict() const = 0;

  /// The part of state_dict() held by this process, as the very tensors and not as copies: for counting bytes.
  virtual StateDict state_here() const { return state_dict(); }

  /// Bytes that the first update will allocate in this process, for the state of parameters without state, if all
  /// trained parameters get gradients.
  int64_t state_bytes_to_come() const {
    return state_bytes_to_come_of([](const at::Tensor& parameter) { return parameter.requires_grad(); });
  }
  /// The same, if the parameters for which `gets_gradient` is true get gradients. 0 if the number is not known.
  virtual int64_t state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& /*gets_gradient*/) const {
    return 0;
  }
  /// Whether the number of bytes to come is known. If the number is not known, and before_writing() returns false, a
  /// Stepper makes the update without the limit of the Stepper's memory_budget, because an update that runs out of
  /// memory midway leaves some parameters updated. The next step plans with the state that exists by then.
  virtual bool knows_state_to_come() const { return true; }

  /// Bytes that an update allocates in this process beside the state to come, and frees again, with the state in
  /// memory.
  virtual int64_t workspace_bytes() const { return 0; }

  /// Whether step() updates parameters of this type without losing small updates to rounding. True for FP32 and FP64.
  /// True for 16-bit types only if the optimizer keeps master weights or rounds at random.
  virtual bool takes(c10::ScalarType dtype) const {
    return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double;
  }

  /// Returns true if this optimizer's step() allocates everything needed before the first write, and is also called for
  /// steps that a gradient scaler skips (see GradientScalingAware). Then:
  /// - The next step(), and only the next step(), calls `hook` just before the first write. If `hook` throws, the step
  ///   is not made.
  /// - An optimizer over several ranks does not tell the other ranks whether that step failed. If one rank fails,
  ///   `hook` throws on the other ranks.
  /// - An empty `hook` cancels an earlier hook.
  virtual bool before_writing(std::function<void()> /*hook*/) { return false; }

  /// Whether step() tells the other ranks itself if this rank fails.
  virtual bool agrees_across_ranks() const { return false; }

  /// Moves the state to a file, and keeps the state in the file from now on. step() gives the same bits, and takes
  /// memory only for the window. Returns false, and does nothing, if this optimizer keeps the state in memory only.
  virtual bool keep_state_in(const StateFile& /*file*/) { return false; }
  /// Moves the state back to memory.
  virtual void keep_state_in_memory() {}
  virtual bool is_state_in_file() const { return false; }
  /// The bytes that keep_state_in() changes, before or after the call. Zeros: keep_state_in() changes nothing.
  virtual StateFileBytes bytes_with_state_in(const StateFile& /*file*/) const { return {}; }

  /// Restores a state returned by state_dict(), by a copy. Throws CorruptFile if the state does not fit; then nothing
  /// has changed.
  virtual void load_state_dict(const StateDict& state) = 0;
};

}  // namespace snug
