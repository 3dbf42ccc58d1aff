#pragma once
// AdamW for FP16 and BF16 parameters: with FP32 master weights, or, for BF16, with stochastic rounding.

#include <cstdint>
#include <functional>
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
  std::vector<uint64_t> places;                   // of each parameter among all, for its random numbers
  at::Tensor grad_scale, found_inf;               // FP32 scalars, or undefined
};

/// Allocates what the update needs. What is returned only writes.
std::function<void()> prepare_low_precision_adamw(LowPrecisionUpdate update);

}  // namespace snug::detail
