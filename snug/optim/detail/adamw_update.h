#pragma once
// The update of AdamW for FP32 and FP64 parameters, on LibTorch's fused kernel.

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/adamw.h>

namespace snug::detail {

/// An FP32 scalar on the parameter's device: the kernel wants it there, so that a skipped step needs no host.
at::Tensor step_count_for(const at::Tensor& parameter);

/// Step counts of many parameters. The kernels take them with this step included. If it is skipped, it is subtracted
/// again.
struct StepCounts {
  StepCounts(const std::vector<at::Tensor>& now, const at::Tensor& found_inf);

  std::vector<at::Tensor> counted, after;
};

struct FusedAdamWCall {
  const torch::optim::AdamWOptions& options;
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps;
  at::Tensor grad_scale, found_inf;  // undefined: none
};

void run_fused_adamw(const FusedAdamWCall& call);

}  // namespace snug::detail
