#pragma once
// MemoryMeter: the bytes of live tensors, their peak, and the kinds of tensors at the peak. Exact to the byte on the
// CPU; backward and all threads are included.
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

/// Bytes of tensor memory on the meter's device. The categories describe the peak, and add up:
/// parameters + gradients + optimizer_state + activations + workspace + outputs + before == level at the start +
/// peak_bytes.
/// A gradient that backward made after the peak is in no category. A gradient that was dropped since the peak is
/// workspace.
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

/// Counts from its construction on. Not copyable; several meters may live at once. A device without an index is the one
/// that is current at the construction. Pinned host memory is not counted.
/// On a device other than the CPU, make and destroy the meter on the thread that trains. While it lives, it takes the
/// place of torch's own memory profiler there (c10::DebugInfoKind::PROFILER_STATE).
/// report() assigns each tensor to a category by its role at that moment, so call it before gradients are dropped.
/// While a meter lives, a custom Function that asks for its saved tensors gets copies of those that something else
/// holds too, so that it may return them as gradients.
class MemoryMeter {
 public:
  /// Throws ConfigError where live bytes cannot be counted (see live_bytes).
  MemoryMeter();
  explicit MemoryMeter(c10::Device device);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// Assigns the tensors of `module` and their gradients to their categories.
  void attach(const torch::nn::Module& module);
  /// Assigns the tensors of the optimizer's state to their category. The optimizer must outlive the meter's last
  /// report().
  void attach(const torch::optim::Optimizer& optimizer);

  /// Bytes now and at most, and the categories at the peak, since the meter was made.
  MemoryReport report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
