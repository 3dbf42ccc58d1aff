#pragma once
// AdamW for FP16 and BF16 parameters: with FP32 master weights, or, for BF16, with stochastic rounding.

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>

namespace snug::detail {

struct LowPrecisionUpdate {
  const torch::optim::AdamWOptions& options;
  std::vector<at::Tensor> parameters;             // FP16 or BF16
  std::vector<at::Tensor> gradients;              // of the same type
  std::vector<at::Tensor> exp_avgs, exp_avg_sqs;  // FP32
  std::vector<at::Tensor> masters;                // FP32; empty: stochastic rounding
  std::vector<at::Tensor> steps;                  // FP32 scalars, this step counted
  std::vector<uint64_t> first_elements;           // the number of each parameter's first element, for random numbers
  at::Tensor grad_scale, found_inf;               // FP32 scalars, or undefined
};

/// The upper halves of the kernels' random numbers (RandomKeys) for `count` elements from number `first` on, as an int
/// tensor on the device of `step`. `step` is an FP32 scalar, and nothing waits for the device.
at::Tensor rounding_noise(const at::Tensor& step, uint64_t first, int64_t count);

/// Bytes that an update of `parameters` tensors with `elements` in all allocates on `device` and frees again. On the
/// CPU nothing. On other devices, beside some numbers for each tensor, a workspace for at most 4 Mi elements: 16 MiB
/// with masters, 68 MiB with stochastic rounding.
int64_t low_precision_workspace_bytes(int64_t elements, int64_t parameters, bool has_masters, c10::Device device);

/// Allocates the memory of the update. The returned function only writes.
std::function<void()> prepare_low_precision_adamw(LowPrecisionUpdate update);

/// The same for a FusedOptimizer's Work. `counted`: the step counts, this step counted.
template <class Work>
std::function<void()> prepare_low_precision_adamw(const Work& work, const std::vector<at::Tensor>& counted,
                                                  std::vector<at::Tensor> masters) {
  return prepare_low_precision_adamw({.options = static_cast<const torch::optim::AdamWOptions&>(*work.options),
                                      .parameters = work.parameters,
                                      .gradients = work.gradients,
                                      .exp_avgs = work.states_named("exp_avg"),
                                      .exp_avg_sqs = work.states_named("exp_avg_sq"),
                                      .masters = std::move(masters),
                                      .steps = counted,
                                      .first_elements = work.first_elements,
                                      .grad_scale = work.grad_scale,
                                      .found_inf = work.found_inf});
}

}  // namespace snug::detail
