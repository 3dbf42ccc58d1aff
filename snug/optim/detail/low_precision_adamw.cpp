#include "snug/optim/detail/low_precision_adamw.h"

#include <limits>
#include <utility>

#include <ATen/ATen.h>

#include "snug/core/detail/parallel.h"
#include "snug/kernels/master_adamw.h"
#include "snug/optim/detail/adam_rules.h"

// On the CPU snug's own kernels do it in one pass over memory. On other devices torch's FP32 kernel works on masters, or on FP32 copies,
// and what comes out is rounded.

namespace snug::detail {
namespace {

template <class Low>
void update_part(const LowPrecisionUpdate& u, const kernels::AdamWStep& step, size_t i, int64_t begin, int64_t end) {
  auto* parameter = static_cast<Low*>(u.parameters[i].mutable_data_ptr()) + begin;
  const auto* gradient = static_cast<const Low*>(u.gradients[i].const_data_ptr()) + begin;
  auto* exp_avg = u.exp_avgs[i].mutable_data_ptr<float>() + begin;
  auto* exp_avg_sq = u.exp_avg_sqs[i].mutable_data_ptr<float>() + begin;
  if (!u.masters.empty()) {
    kernels::master_adamw_update(step, u.masters[i].mutable_data_ptr<float>() + begin, parameter, gradient, exp_avg,
                                 exp_avg_sq, end - begin);
  } else if constexpr (std::is_same_v<Low, kernels::BFloat16>) {
    const kernels::RandomKey key{.seed = u.places[i],
                                 .step = static_cast<uint64_t>(u.steps[i].item<double>()),
                                 .offset = static_cast<uint64_t>(begin)};
    kernels::stochastic_adamw_update(step, key, parameter, gradient, exp_avg, exp_avg_sq, end - begin);
  }
}

void update_on_cpu(const LowPrecisionUpdate& u) {
  std::vector<int64_t> counts;
  std::vector<kernels::AdamWStep> steps;
  for (size_t i = 0; i < u.parameters.size(); ++i) {
    counts.push_back(u.parameters[i].numel());
    steps.push_back(kernel_step(u.options, u.steps[i].item<double>(), u.grad_scale));
  }
  constexpr int64_t kGrain = 1 << 14;
  parallel_for(counts, kGrain, [&](size_t i, int64_t begin, int64_t end) {
    if (u.parameters[i].scalar_type() == at::kHalf) {
      update_part<kernels::Float16>(u, steps[i], i, begin, end);
    } else {
      update_part<kernels::BFloat16>(u, steps[i], i, begin, end);
    }
  });
}

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
  const auto [beta1, beta2] = u.options.betas();
  at::_fused_adamw_(parameters, gradients, u.exp_avgs, u.exp_avg_sqs, /*max_exp_avg_sqs=*/{}, u.steps, u.options.lr(),
                    beta1, beta2, u.options.weight_decay(), u.options.eps(), /*amsgrad=*/false, /*maximize=*/false,
                    if_defined(u.grad_scale), if_defined(u.found_inf));
}

// Round to BF16 by adding a random 16-bit number below its last place and cutting off what is below: up with the probability of the
// fraction that is cut off.
std::function<void()> prepare_rounding_elsewhere(LowPrecisionUpdate update) {
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
          update.parameters[i].masked_fill_(wide[i].isnan(),
                                            std::numeric_limits<double>::quiet_NaN());  // adding overflows there
        }
      };
}

}  // namespace

std::function<void()> prepare_low_precision_adamw(LowPrecisionUpdate update) {
  if (update.parameters.front().is_cpu()) {
    if (update.found_inf.defined() && update.found_inf.item<float>() != 0) {
      return [] {};
    }
    return [update = std::move(update)] { update_on_cpu(update); };
  }
  if (update.masters.empty()) {
    return prepare_rounding_elsewhere(std::move(update));
  }
  auto gradients = in_fp32(update.gradients);
  return [update = std::move(update), gradients = std::move(gradients)] {
    fused_adamw(update, update.masters, gradients);
    at::_foreach_copy_(update.parameters, update.masters);
  };
}

}  // namespace snug::detail
