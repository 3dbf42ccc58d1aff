#pragma once
// A forward and backward pass of which a TapeRecorder writes down everything, and that leaves no trace.

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/core/bytes.h"
#include "snug/remat/detail/initialised_parameters.h"
#include "snug/remat/detail/tape_recorder.h"

namespace snug::detail {

/// The leaves into which a backward pass from `loss` accumulates.
std::vector<at::Tensor> leaves_of(const at::Tensor& loss);

struct RecordedStep {
  bool goes_backward = true;
  /// Above the level at the call, without copies of gradients. More throws c10::OutOfMemoryError.
  Bytes memory = Bytes::unlimited();
  /// Of all runs of this step that are to be the same; or null.
  InitialisedParameters* parameters = nullptr;
};

/// Runs a step on a tape that `recorder` listens to. Gradients and buffers are as before afterwards, also if it throws; generators are not.
/// Throws ConfigError where the loss is none, where hooks would run that must not, or where an earlier run initialised a parameter.
void record_step(const std::function<at::Tensor()>& forward_and_loss, const std::shared_ptr<OpTape>& tape,
                 TapeRecorder& recorder, RecordedStep options = {});

}  // namespace snug::detail
