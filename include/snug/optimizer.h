#pragma once
// To write an optimizer of your own. Any torch::optim::Optimizer works with a Stepper, a GradScaler and snapshots. An
// optimizer that also derives from one of the interfaces below gets more, and needs none of the other interfaces:
// docs/optimizers.md. snug's own optimizers have all interfaces.
//
//   class SignSgd : public torch::optim::Optimizer, public snug::MemoryAware { ... };

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "snug/core.h"
#include "snug/state.h"

namespace snug {

/// An optimizer that unscales and skips on the device, inside its own pass over the parameters, so that no step waits
/// for the host.
class GradientScalingAware {
 public:
  virtual ~GradientScalingAware() = default;

  /// Applies to the next step() only.
  /// - `grad_scale`: FP32 scalar tensor. The step divides the gradients by `grad_scale`. Undefined if the gradients are
  ///   unscaled already.
  /// - `found_inf`: FP32 scalar tensor. If the value is 1, the step changes neither parameters nor state.
  virtual void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) = 0;
};

/// An optimizer that names its own state. A snapshot of the optimizer consists of plain tensors and numbers, and the
/// same state gives the same bytes. See snug::stateful in snug/snapshot.h.
class StatefulOptimizer {
 public:
  virtual ~StatefulOptimizer() = default;

  /// Everything that step() depends on besides parameters and gradients, learning rates included. As in Python, the
  /// tensors are the state's own tensors, which the next step changes, and the numbers have the current values. To keep
  /// the current state, save the dictionary at once, or clone the tensors.
  virtual StateDict state_dict() const = 0;

  /// Restores a state returned by state_dict(), by a copy. Throws CorruptFile if the state does not fit; then nothing
  /// has changed.
  virtual void load_state_dict(const StateDict& state) = 0;
};

/// An optimizer that knows the bytes of its state and of its updates, so that plans count the bytes before the first
/// step. Without the interface, and if before_writing() returns false, a Stepper updates without the limit of the
/// budget, because an update that runs out of memory midway leaves some parameters updated. Exception: the bytes of
/// torch's Adam, AdamW, RMSprop, SGD and Adagrad are known, so their updates stay within the limit.
class MemoryAware {
 public:
  virtual ~MemoryAware() = default;

  /// The state in this process, as the very tensors and not as copies.
  virtual std::vector<at::Tensor> state_tensors() const = 0;

  /// Bytes that the first update will allocate in this process, for the state of parameters without state, if all
  /// trained parameters get gradients.
  int64_t state_bytes_to_come() const { return state_bytes_to_come_of(&at::Tensor::requires_grad); }
  /// The same, if the parameters for which `gets_gradient` is true get gradients.
  virtual int64_t state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& gets_gradient) const = 0;

  /// Bytes that an update allocates in this process beside the state to come, and frees again, with the state in
  /// memory.
  virtual int64_t workspace_bytes() const { return 0; }
};

/// An optimizer that promises more about its updates than torch's interface. The functions here answer for an optimizer
/// without promises.
class UpdateAware {
 public:
  virtual ~UpdateAware() = default;

  /// Whether step() updates parameters of this type without losing small updates to rounding. True for FP32 and FP64.
  /// True for 16-bit types only if the optimizer keeps master weights or rounds at random.
  virtual bool takes(c10::ScalarType dtype) const {
    return dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double;
  }

  /// Returns true if this optimizer's step() allocates everything needed before the first write. Then:
  /// - The next step(), and only the next step(), calls `hook` just before the first write. If `hook` throws, the step
  ///   is not made.
  /// - An optimizer over several ranks does not tell the other ranks whether that step failed. If one rank fails,
  ///   `hook` throws on the other ranks.
  /// - An empty `hook` cancels an earlier hook, as after a step that a gradient scaler has left out.
  virtual bool before_writing(std::function<void()> /*hook*/) { return false; }

  /// Whether step() without a hook exchanges messages with other ranks, so that either all ranks make the update or no
  /// rank does.
  virtual bool agrees_across_ranks() const { return false; }

  /// Names for error messages, such as a module's named_parameters().
  virtual void name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& /*names*/) {}
};

/// The memory of the parameters' device, where each optimizer's state is at first.
struct StateOnDevice {
  friend bool operator==(const StateOnDevice&, const StateOnDevice&) = default;
};

/// A file for an optimizer's state, outside of memory. Gradients and parameters of another device than the CPU pass
/// through the window, too, as with StateOnHost.
struct StateFile {
  /// A folder on a disk. Empty: the system's temporary directory, which on many systems is itself memory. A relative
  /// path starts at the program's directory at the time of the call that gets the StateFile. The file has no name, so
  /// the file disappears with the process: state that must survive belongs in a snapshot.
  std::filesystem::path directory = {};
  /// Tensor memory through which an update streams the state, in three parts: while one part is computed, another part
  /// is read and the third is written. An update takes more memory than the window only if a parameter must stay whole
  /// and the parameter's state is larger than a third of the window.
  Bytes window = Bytes(24 << 20);

  friend bool operator==(const StateFile&, const StateFile&) = default;
};

/// The host's memory, for the state of parameters on another device. The CPU's kernels make the updates. For parameters
/// on the CPU the same as StateOnDevice.
struct StateOnHost {
  /// Host memory through which gradients and parameters pass in an update, in three parts, page-locked. While one part
  /// is updated, gradients and parameters are copied to another part, and new parameters from the third part.
  /// LibTorch's allocator of page-locked memory may round up to a power of two. An update takes more memory than the
  /// window only if a parameter must stay whole and takes, with the parameter's gradient, more than a third of the
  /// window.
  Bytes window = Bytes(16 << 20);

  friend bool operator==(const StateOnHost&, const StateOnHost&) = default;
};

/// The place of an optimizer's state.
using StatePlacement = std::variant<StateOnDevice, StateFile, StateOnHost>;

/// An optimizer whose state can be in several places.
class MovableState {
 public:
  /// Bytes of an optimizer with the state in another place than the memory of the parameters' device.
  struct PlacementBytes {
    int64_t moved = 0;  ///< the state of all trained parameters, made already or still to be made, that is elsewhere
    /// Memory of the parameters' device that an update allocates and frees again; on the CPU, a window included.
    int64_t workspace = 0;

    friend bool operator==(const PlacementBytes&, const PlacementBytes&) = default;
  };

  virtual ~MovableState() = default;

  /// Moves the state, and keeps the state in the new place from now on. step() gives the same bits, except where the
  /// kernels of the parameters' device and the kernels of the place differ in bits. With a file, step() takes memory
  /// only for the window. For parameters on a device, a lack of the host's memory is an Error that names the host, here
  /// and in step(). Returns false, and does nothing, if this optimizer's state cannot be in `place`.
  virtual bool keep_state_in(const StatePlacement& place) = 0;
  virtual StatePlacement state_placement() const = 0;
  /// Whether the state can be in StateOnDevice.
  virtual bool may_stay_on_device() const { return true; }
  /// The bytes with the state in `place`, before or after keep_state_in(). Zeros for StateOnDevice, and if the state
  /// cannot be in `place`.
  virtual PlacementBytes bytes_with_state_in(const StatePlacement& place) const = 0;
};

}  // namespace snug
