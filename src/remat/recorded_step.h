#pragma once
// record_step: runs a forward and backward pass, has a TapeRecorder record everything, and leaves no trace.

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
  /// The most bytes above the level at the call, without copies of gradients. More bytes throw c10::OutOfMemoryError.
  Bytes memory = Bytes::unlimited();
  /// Parameters seen by all runs of the same step; may be null.
  InitialisedParameters* parameters = nullptr;
};

/// The loss is on another device than the recorder.
struct OtherDevice : ConfigError {
  c10::Device device;

  explicit OtherDevice(c10::Device of_loss)
      : ConfigError("plan_activations: the loss is on " + of_loss.str() +
                    ", and was on another device before; plan for each device"),
        device(of_loss) {}
};

/// The program cannot be planned, whatever part of a batch runs.
struct PlanningMisuse : ConfigError {
  using ConfigError::ConfigError;
};

/// Runs a step on a tape that `recorder` listens to. Then `journal` takes back the step's changes, also if the step
/// throws. Autocast's cache must be empty before, so that the step casts weights as each step does, and is empty
/// afterwards. Throws
/// - OtherDevice;
/// - ConfigError if the loss is not a scalar with a graph;
/// - ConfigError if hooks would run that must not run;
/// - ConfigError if an earlier run initialised a parameter.
void record_step(const std::function<at::Tensor()>& forward_and_loss, const std::shared_ptr<OpTape>& tape,
                 TapeRecorder& recorder, EffectJournal& journal, RecordedStep options = {});

/// The accelerator that this process uses, or else the CPU.
c10::Device likely_device();

/// Returns run(device) for the device of a step's loss. `run` must record the step. If the loss is not on the likely
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
