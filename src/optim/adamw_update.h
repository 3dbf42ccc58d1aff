#pragma once
// The state and the update of AdamW for FP32 and FP64 parameters, on LibTorch's fused kernel. Adam shares the state and
// the counts of steps. `Work` and `State` are FusedOptimizer's types.

#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adamw.h>

namespace snug::detail {

/// An FP32 scalar on the parameter's device: the kernel needs the count on the device, so that a skipped step needs no
/// host.
at::Tensor step_count_for(const at::Tensor& parameter);

/// Adds step, exp_avg and exp_avg_sq. The moments have the parameter's type.
template <class State>
void add_adam_state(State& state, const at::Tensor& parameter) {
  state.tensors.emplace_back("step", step_count_for(parameter));
  state.tensors.emplace_back("exp_avg", at::zeros_like(parameter, at::MemoryFormat::Preserve));
  state.tensors.emplace_back("exp_avg_sq", at::zeros_like(parameter, at::MemoryFormat::Preserve));
}

/// Step counts of many parameters. The kernels take counts with this step included. If this step is skipped, the step
/// is subtracted again.
struct StepCounts {
  StepCounts(const std::vector<at::Tensor>& now, const at::Tensor& found_inf);

  std::vector<at::Tensor> counted, after;
};

/// Returns a function that calls `update` and then writes the counts into the states of `work`, because a state_dict()
/// shows the counts.
template <class Work>
std::function<void()> and_count(std::function<void()> update, const Work& work, const StepCounts& steps) {
  return [update = std::move(update), counts = work.states_named("step"), after = steps.after] {
    update();
    at::_foreach_copy_(counts, after);
  };
}

struct FusedAdamWCall {
  const torch::optim::AdamWOptions& options;
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps;
  at::Tensor grad_scale, found_inf;  // undefined: none
};

void run_fused_adamw(const FusedAdamWCall& call);

/// The update of a group with AdamW's options. Call and_count() on the result.
template <class Work>
std::function<void()> prepare_fused_adamw(const Work& work, const StepCounts& steps) {
  return [call = FusedAdamWCall{.options = static_cast<const torch::optim::AdamWOptions&>(*work.options),
                                .parameters = work.parameters,
                                .gradients = work.gradients,
                                .exp_avgs = work.states_named("exp_avg"),
                                .exp_avg_sqs = work.states_named("exp_avg_sq"),
                                .steps = steps.counted,
                                .grad_scale = work.grad_scale,
                                .found_inf = work.found_inf}] { run_fused_adamw(call); };
}

}  // namespace snug::detail
