#include "snug/optim/detail/low_precision_adamw.h"

#include <limits>
#include <utility>

#include <ATen/ATen.h>

#include "snug/kernels/master_adamw.h"
#include "snug/optim/detail/adam_rules.h"
#include "snug/optim/detail/parallel.h"

// On the CPU snug's own kernels do it in one pass over memory. On other devices torch's FP32 kernel works on masters, or on FP32 copies,
// and what comes out is rounded.

namespace snug::detail {
namespace {

template <class Low>
void update_on_cpu(const LowPrecisionUpdate& u, size_t i) {
  const double t = u.steps[i].item<double>();
  const auto step = kernel_step(u.options, t, u.grad_scale);
  auto* parameter = static_cast<Low*>(u.parameters[i].mutable_data_ptr());
  const auto* gradient = static_cast<const Low*>(u.gradients[i].const_data_ptr());
  auto* exp_avg = u.exp_avgs[i].mutable_data_ptr<float>();
  auto* exp_avg_sq = u.exp_avg_sqs[i].mutable_data_ptr<float>();
  float* master = u.masters.empty() ? nullptr : u.masters[i].mutable_data_ptr<float>();
  constexpr int64_t kGrain = 1 << 14;
  parallel_for(u.parameters[i].numel(), kGrain, [&](int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    if (master != nullptr) {
      kernels::master_adamw_update(step, master + begin, parameter + begin, gradient + begin, exp_avg + begin,
                                   exp_avg_sq + begin, count);
    } else if constexpr (std::is_same_v<Low, kernels::BFloat16>) {
      const kernels::RandomKey key{
          .seed = u.places[i], .step = static_cast<uint64_t>(t), .offset = static_cast<uint64_t>(begin)};
      kernels::stochastic_adamw_update(step, key, parameter + begin, gradient + begin, exp_avg + begin,
                                       exp_avg_sq + begin, count);
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
    return [update = std::move(update)] {
      for (size_t i = 0; i < update.parameters.size(); ++i) {
        if (update.parameters[i].scalar_type() == at::kHalf) {
          update_on_cpu<kernels::Float16>(update, i);
        } else {
          update_on_cpu<kernels::BFloat16>(update, i);
        }
      }
    };
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
