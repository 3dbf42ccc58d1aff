#pragma once
// A forward and backward pass of which a TapeRecorder writes down everything, and that leaves no trace.

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "snug/core.h"
#include "src/remat/effect_journal.h"
#include "src/remat/initialised_parameters.h"
#include "src/remat/tape_recorder.h"

namespace snug::detail {

struct RecordedStep {
  bool goes_backward = true;
  /// Above the level at the call, without copies of gradients. More throws c10::OutOfMemoryError.
  Bytes memory = Bytes::unlimited();
  /// Of all runs of this step that are to be the same; or null.
  InitialisedParameters* parameters = nullptr;
};

/// The loss is on another device than the recorder's.
struct OtherDevice : ConfigError {
  c10::Device device;

  explicit OtherDevice(c10::Device of_loss)
      : ConfigError("plan_activations: the loss is on " + of_loss.str() +
                    ", and was on another device before; plan for each device"),
        device(of_loss) {}
};

/// Runs a step on a tape that `recorder` listens to, and has `journal` take back what it changed, also if it throws.
/// Throws OtherDevice, and ConfigError where the loss is none, where hooks would run that must not, or where an earlier
/// run initialised a parameter.
void record_step(const std::function<at::Tensor()>& forward_and_loss, const std::shared_ptr<OpTape>& tape,
                 TapeRecorder& recorder, EffectJournal& journal, RecordedStep options = {});

/// The accelerator that this process uses, or else the CPU.
c10::Device likely_device();

/// Returns run(device) for the device of a step's loss. `run` records the step. Where the loss is not on the likely
/// device, `run` is called a second time.
template <typename Run>
auto on_device_of_loss(const Run& run) {
  c10::Device device = likely_device();
  try {
    return run(device);
  } catch (const OtherDevice& other) {
    device = other.device;
  }
  return run(device);
}

}  // namespace snug::detail
