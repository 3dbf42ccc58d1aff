#pragma once
// MemoryMeter: how many bytes of tensors are alive, how many were at the worst moment, and what they were. Exact to the byte on
// CPU; backward and all threads included.
//
//   snug::MemoryMeter meter;
//   meter.attach(*model);
//   meter.attach(optimizer);
//   train_one_step();
//   std::cout << meter.report().activations << " bytes of activations at the peak\n";

#include <cstdint>
#include <memory>

#include <c10/core/Device.h>

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace snug {

/// Bytes of tensor memory on the meter's device. The categories say what was held at the peak (a gradient that backward made after it
/// is in none of them, and one that was dropped since is workspace):
/// parameters + gradients + optimizer_state + activations + workspace + outputs + before == level at the start + peak_bytes.
struct MemoryReport {
  int64_t live_bytes = 0;       ///< alive now, above the level when the meter was made
  int64_t peak_bytes = 0;       ///< most that was alive at once, above that level
  int64_t parameters = 0;       ///< parameters and buffers of attached modules
  int64_t gradients = 0;        ///< in attached parameters' grad() when report() is called
  int64_t optimizer_state = 0;  ///< state of attached optimizers
  int64_t activations = 0;      ///< saved for backward by autograd
  int64_t workspace = 0;        ///< anything else that was allocated under the meter and is gone again
  int64_t outputs = 0;          ///< anything else that was allocated under the meter and is still alive
  int64_t before = 0;           ///< what was alive before the meter and is not attached
};

/// Counts from its construction on. Not copyable; several may live at once. On a device other than the CPU, make and destroy it on the
/// thread that trains: there it takes the place of torch's own profiler of memory (c10::DebugInfoKind::PROFILER_STATE) while it lives, and
/// a device without an index is the one that is current then. Pinned host memory is not counted. A tensor is named by what it is when
/// report() is called, so call that before gradients are dropped. A custom Function that asks for what it saved gets copies of tensors that something
/// else holds, too, so that it may return them as gradients.
class MemoryMeter {
 public:
  /// Throws ConfigError where live bytes cannot be counted (see live_bytes).
  MemoryMeter();
  explicit MemoryMeter(c10::Device device);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// Names the tensors of `module`, and their gradients.
  void attach(const torch::nn::Module& module);
  /// Names the tensors of the optimizer's state. The optimizer must outlive the meter's last report().
  void attach(const torch::optim::Optimizer& optimizer);

  MemoryReport report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
