#include "snug/optim/detail/low_precision_adamw.h"

#include <optional>
#include <utility>

#include <ATen/ATen.h>

namespace snug::detail {
namespace {

std::vector<at::Tensor> in_fp32(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> wide;
  for (const at::Tensor& tensor : tensors) {
    wide.push_back(
        at::empty_like(tensor, tensor.options().dtype(at::kFloat), at::MemoryFormat::Preserve).copy_(tensor));
  }
  return wide;
}

void fused_adamw(const LowPrecisionUpdate& u, const std::vector<at::Tensor>& parameters,
                 const std::vector<at::Tensor>& gradients) {
  const auto optional = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  const auto [beta1, beta2] = u.options.betas();
  at::_fused_adamw_(parameters, gradients, u.exp_avgs, u.exp_avg_sqs, /*max_exp_avg_sqs=*/{}, u.steps, u.options.lr(),
                    beta1, beta2, u.options.weight_decay(), u.options.eps(), /*amsgrad=*/false, /*maximize=*/false,
                    optional(u.grad_scale), optional(u.found_inf));
}

// Round to BF16 by adding a random 16-bit number below its last place and cutting off what is below: up with the probability of the
// fraction that is cut off. (Croci et al. 2022, "Stochastic rounding: implementation, error analysis and applications", section 7.)
std::function<void()> prepare_rounding(LowPrecisionUpdate update) {
  std::vector<at::Tensor> noise;
  for (const at::Tensor& parameter : update.parameters) {
    noise.push_back(at::randint_like(parameter, 1 << 16, parameter.options().dtype(at::kInt)));
  }
  auto wide = in_fp32(update.parameters);
  auto gradients = in_fp32(update.gradients);
  return
      [update = std::move(update), noise = std::move(noise), wide = std::move(wide), gradients = std::move(gradients)] {
        fused_adamw(update, wide, gradients);
        for (size_t i = 0; i < wide.size(); ++i) {
          at::Tensor bits = noise[i];
          bits.add_(wide[i].view(at::kInt)).bitwise_and_(-(1 << 16));
          update.parameters[i].copy_(bits.view(at::kFloat));
        }
      };
}

}  // namespace

std::function<void()> prepare_low_precision_adamw(LowPrecisionUpdate update) {
  if (update.masters.empty()) {
    return prepare_rounding(std::move(update));
  }
  auto gradients = in_fp32(update.gradients);
  return [update = std::move(update), gradients = std::move(gradients)] {
    fused_adamw(update, update.masters, gradients);
    at::_foreach_copy_(update.parameters, update.masters);
  };
}

}  // namespace snug::detail
