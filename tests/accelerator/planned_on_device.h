#pragma once
// The small training of tests/step/planned_training.h on an accelerator. On a GPU its batches are larger, since the
// allowance for gaps in CUDA's memory is more than the small ones take.

#include <cstdint>
#include <functional>

#include <torch/torch.h>

#include "snug/stepper.h"
#include "tests/accelerator/accelerator.h"
#include "tests/step/planned_training.h"
#include "tests/support/move_to.h"
#include "tests/support/sim_device/sim_device.h"

namespace snug::testing::planned_on_device {

namespace nn = torch::nn;
using planned::PlannedTraining;

inline c10::Device device() { return accelerator(); }

/// Of the `small` number of items on the simulated accelerator.
inline int64_t items(int64_t small) { return sim_device::is_present() ? small : small * 512; }

inline int64_t live() { return planned::live(device()); }

inline nn::Sequential on_device(nn::Sequential model) {
  move_to(*model, device());
  return model;
}

inline nn::Sequential deep(double dropout = 0) { return on_device(planned::deep(dropout)); }

inline Batch device_batch(int64_t items) {
  const Batch batch = planned::make_batch(items);
  return {batch[0].to(device()), batch[1].to(device())};
}

inline int64_t plain_bytes(const Batch& batch, const StepperOptions& options,
                           const std::function<nn::Sequential()>& make) {
  return planned::plain_bytes(batch, options, make, device());
}

inline int64_t smallest_bytes(const Batch& batch, const StepperOptions& options,
                              const std::function<nn::Sequential()>& make) {
  return planned::smallest_bytes(batch, options, make, device());
}

}  // namespace snug::testing::planned_on_device
