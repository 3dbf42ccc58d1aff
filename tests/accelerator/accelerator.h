#pragma once
// The device of the tests of accelerators, and what they share. It is the simulated accelerator, or CUDA's current
// device if the environment has SNUG_ACCELERATOR=cuda. A process has one of them.

#include <functional>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/move_to.h"
#include "tests/support/sim_device/sim_device.h"

namespace snug::testing {

/// Begins a test of what only the simulated accelerator shows: times that are known, streams that run late, allocations
/// that are refused on demand.
#define SNUG_SKIP_UNLESS_SIMULATED()                      \
  if (!sim_device::is_present()) {                        \
    GTEST_SKIP() << "only the simulated accelerator can"; \
  }

inline c10::Device accelerator() { return sim_device::is_present() ? sim_device::device() : c10::Device(torch::kCUDA); }

/// The sum's gradients with respect to the inputs.
inline std::vector<torch::Tensor> gradients(const torch::Tensor& result, const std::vector<torch::Tensor>& inputs) {
  for (const torch::Tensor& input : inputs) {
    input.mutable_grad().reset();
  }
  result.sum().backward();
  std::vector<torch::Tensor> found;
  for (const torch::Tensor& input : inputs) {
    found.push_back(input.grad().clone());
  }
  return found;
}

inline torch::Tensor leaf(std::vector<int64_t> sizes) { return torch::randn(sizes, accelerator()).requires_grad_(); }

}  // namespace snug::testing
