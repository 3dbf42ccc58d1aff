#pragma once
// The state and the update of Adam and AdamW for FP32 and FP64 parameters, on LibTorch's fused kernels, and of AdamW on
// devices with kernels of snug's own. `Work` and `State` are FusedOptimizer's types.

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros_like.h>

#include "src/core/in_parts.h"
#include "src/kernels/device_kernels.h"
#include "src/optim/adam_rules.h"

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
struct UpdateCounts {
  UpdateCounts(const std::vector<at::Tensor>& now, const at::Tensor& found_inf);

  std::vector<at::Tensor> counted, after;
};

/// Returns a function that calls `update` and then writes the counts into the states of `work`, because a state_dict()
/// shows the counts.
template <class Work>
std::function<void()> and_count(std::function<void()> update, const Work& work, const UpdateCounts& steps) {
  return [update = std::move(update), counts = work.states_named("step"), after = steps.after] {
    update();
    at::_foreach_copy_(counts, after);
  };
}

/// The update of a group by AdamW, for kernels of snug's own. The parameters have one type and one device.
struct AdamWUpdate {
  const torch::optim::AdamWOptions& options;
  std::vector<at::Tensor> parameters;             // FP32, FP16 or BF16
  std::vector<at::Tensor> gradients;              // of the same type
  std::vector<at::Tensor> exp_avgs, exp_avg_sqs;  // FP32
  std::vector<at::Tensor> masters;                // FP32; empty for FP32 parameters, and for stochastic rounding
  std::vector<at::Tensor> steps;                  // FP32 scalars, this step counted
  std::vector<uint64_t> first_elements;           // the number of each parameter's first element, for random numbers
  at::Tensor grad_scale, found_inf;               // FP32 scalars, or undefined
};

template <class Work>
AdamWUpdate adamw_update(const Work& work, const std::vector<at::Tensor>& counted, std::vector<at::Tensor> masters) {
  return {.options = static_cast<const torch::optim::AdamWOptions&>(*work.options),
          .parameters = work.parameters,
          .gradients = work.gradients,
          .exp_avgs = work.states_named("exp_avg"),
          .exp_avg_sqs = work.states_named("exp_avg_sq"),
          .masters = std::move(masters),
          .steps = counted,
          .first_elements = work.first_elements,
          .grad_scale = work.grad_scale,
          .found_inf = work.found_inf};
}

/// Whether a device has kernels of snug's own for AdamWUpdate: CUDA in a build with SNUG_CUDA_ADAMW, and for tests a
/// device of type PrivateUse1 after set_update_launcher(), up to set_update_launcher(nullptr).
bool has_device_update(c10::Device device);
void set_update_launcher(kernels::detail::UpdateLauncher launcher);

/// Starts the kernels: with the CPU's bits (FP32: if the loss scale is a power of two), without memory of the device
/// and without waiting.
void update_on_device(const AdamWUpdate& update);

/// The update of a group with the options O, Adam's or AdamW's. `counted`: see UpdateCounts. Call and_count() on the
/// result.
template <class O, class Work>
std::function<void()> prepare_fused_adam(const Work& work, const std::vector<at::Tensor>& counted) {
  using MaybeTensor = std::optional<at::Tensor>;
  using Kernel =
      void (*)(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, double,
               double, double, double, double, bool, bool, const MaybeTensor&, const MaybeTensor&);
  const at::Tensor& first = work.parameters.front();
  if constexpr (kDecouplesDecay<O>) {
    if (first.scalar_type() == at::kFloat && has_device_update(first.device())) {
      return [update = adamw_update(work, counted, {})] { update_on_device(update); };
    }
  }
  return [work, counted, exp_avgs = work.states_named("exp_avg"), exp_avg_sqs = work.states_named("exp_avg_sq")] {
    const Kernel kernel = kDecouplesDecay<O> ? Kernel(&at::_fused_adamw_) : Kernel(&at::_fused_adam_);
    const O& o = static_cast<const O&>(*work.options);
    const auto fused = [&](at::TensorList parameters, at::TensorList gradients, at::TensorList averages,
                           at::TensorList squares, at::TensorList counts) {
      const auto [beta1, beta2] = o.betas();
      kernel(parameters, gradients, averages, squares, /*max_exp_avg_sqs=*/{}, counts, o.lr(), beta1, beta2,
             o.weight_decay(), o.eps(), /*amsgrad=*/false, /*maximize=*/false, if_defined(work.grad_scale),
             if_defined(work.found_inf));
    };
    call_in_parts(fused, work.parameters, work.gradients, exp_avgs, exp_avg_sqs, counted);
  };
}

}  // namespace snug::detail
