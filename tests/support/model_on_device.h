#pragma once
// Random models on the simulated accelerator.

#include <algorithm>

#include <torch/torch.h>

#include "tests/support/move_to.h"
#include "tests/support/random_model.h"
#include "tests/support/sim_device/sim_device.h"

namespace snug::testing {

inline RandomModel model_on_device(uint64_t seed) {
  RandomModel model = random_model(seed);
  move_to(*model.module, sim_device::device());
  model.input = model.input.detach().to(sim_device::device()).requires_grad_(model.input.requires_grad());
  return model;
}

// Some of the models make tensors of their own on the CPU, and the simulated device has no views of conjugates.
inline bool runs_on_device(const RandomModel& model) {
  if (std::ranges::find(model.kinds, "conjugates") != model.kinds.end()) {
    return false;
  }
  try {
    model.loss(model.input).backward();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

// Such a function gets a copy of a tensor that a plan holds, which takes a time that is not predicted.
inline bool unpacks_itself(const RandomModel& model) {
  return std::ranges::find(model.kinds, "custom_function") != model.kinds.end();
}

}  // namespace snug::testing
