#include "src/optim/adamw_update.h"

#include <ATen/ATen.h>

#include "src/core/in_parts.h"
#include "src/optim/adam_rules.h"

namespace snug::detail {

at::Tensor step_count_for(const at::Tensor& parameter) { return at::zeros({}, parameter.options().dtype(at::kFloat)); }

StepCounts::StepCounts(const std::vector<at::Tensor>& now, const at::Tensor& found_inf)
    : counted(at::_foreach_add(now, 1)),
      after(found_inf.defined() ? at::_foreach_sub(counted, std::vector<at::Tensor>(counted.size(), found_inf))
                                : counted) {}

void run_fused_adamw(const FusedAdamWCall& call) {
  const auto& o = call.options;
  const auto fused = [&](at::TensorList parameters, at::TensorList gradients, at::TensorList averages,
                         at::TensorList squares, at::TensorList counts) {
    const auto [beta1, beta2] = o.betas();
    at::_fused_adamw_(parameters, gradients, averages, squares, /*max_exp_avg_sqs=*/{}, counts, o.lr(), beta1, beta2,
                      o.weight_decay(), o.eps(), /*amsgrad=*/false, /*maximize=*/false, if_defined(call.grad_scale),
                      if_defined(call.found_inf));
  };
  call_in_parts(fused, call.parameters, call.gradients, call.exp_avgs, call.exp_avg_sqs, call.steps);
}

}  // namespace snug::detail
