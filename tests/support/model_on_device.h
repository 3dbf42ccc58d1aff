#pragma once
// Random models on the accelerator.

#include <algorithm>

#include <torch/torch.h>

#include "tests/accelerator/accelerator.h"
#include "tests/support/move_to.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_model.h"

namespace snug::testing {

/// While it lives, a GPU computes with kernels that repeat themselves, where LibTorch has such.
class [[nodiscard]] KernelsThatRepeatThemselves {
 public:
  KernelsThatRepeatThemselves() { set(true); }
  ~KernelsThatRepeatThemselves() { set(false); }
  KernelsThatRepeatThemselves(const KernelsThatRepeatThemselves&) = delete;
  KernelsThatRepeatThemselves& operator=(const KernelsThatRepeatThemselves&) = delete;

 private:
  static void set(bool on) {
    if (!sim_device::is_present()) {
      at::globalContext().setDeterministicCuDNN(on);
      at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/on);
    }
  }
};

inline RandomModel model_on_device(uint64_t seed) {
  RandomModel model = random_model(seed);
  move_to(*model.module, accelerator());
  model.input = model.input.detach().to(accelerator()).requires_grad_(model.input.requires_grad());
  return model;
}

// Some of the models make tensors of their own on the CPU. The simulated device has no views of conjugates, and no
// pointer of the host writes to memory of a GPU.
inline bool runs_on_device(const RandomModel& model) {
  const auto has = [&](const char* kind) { return std::ranges::find(model.kinds, kind) != model.kinds.end(); };
  if (has(sim_device::is_present() ? "conjugates" : "pointer_writes")) {
    return false;
  }
  try {
    model.loss(model.input).backward();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

// Some kernels of CUDA add in an order that changes from run to run.
inline bool repeats_itself(Step& step) {
  if (sim_device::is_present()) {
    return true;
  }
  const Outcome once = step.run(std::nullopt), again = step.run(std::nullopt);
  return torch::equal(once.loss, again.loss) && same_bits(once.gradients, again.gradients);
}

// On a GPU the thread that goes backward has workspaces of its own, which it takes at its first product.
inline void take_workspaces_of_backward(Step& step, const ActivationPlan& plan) {
  if (!sim_device::is_present()) {
    step.run(plan);
  }
}

// cuDNN makes the state of dropout anew after each seed, 6 MiB of it, and frees the old one then.
inline void expect_peak(int64_t found, int64_t predicted) {
  EXPECT_LE(found, predicted);
  if (sim_device::is_present()) {
    EXPECT_EQ(found, predicted);
  }
}

// Such a function gets a copy of a tensor that a plan holds, which takes a time that is not predicted.
inline bool unpacks_itself(const RandomModel& model) {
  return std::ranges::find(model.kinds, "custom_function") != model.kinds.end();
}

}  // namespace snug::testing
