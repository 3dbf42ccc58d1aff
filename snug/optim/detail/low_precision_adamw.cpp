#include "snug/optim/detail/low_precision_adamw.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ATen.h>

#include "snug/core/detail/parallel.h"
#include "snug/kernels/detail/master_adamw.h"
#include "snug/kernels/detail/random_bits.h"
#include "snug/optim/detail/adam_rules.h"

// On the CPU snug's own kernels do it in one pass over memory. On other devices torch's FP32 kernel works on masters,
// or on FP32 copies, and what comes out is rounded.

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
    const kernels::RandomKey key{.step = static_cast<uint64_t>(u.steps[i].item<double>()),
                                 .offset = u.first_elements[i] + static_cast<uint64_t>(begin)};
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

// Round to BF16 by adding a random 16-bit number below its last place and cutting off what is below: up with the
// probability of the fraction that is cut off.
std::function<void()> prepare_rounding_elsewhere(LowPrecisionUpdate update) {
  std::vector<at::Tensor> noise;
  for (size_t i = 0; i < update.parameters.size(); ++i) {
    noise.push_back(rounding_noise(update.steps[i], update.first_elements[i], update.parameters[i].numel()));
  }
  auto wide = in_fp32(update.parameters);
  auto gradients = in_fp32(update.gradients);
  return
      [update = std::move(update), noise = std::move(noise), wide = std::move(wide), gradients = std::move(gradients)] {
        fused_adamw(update, wide, gradients);
        for (size_t i = 0; i < wide.size(); ++i) {
          at::Tensor bits = noise[i].as_strided(wide[i].sizes(), wide[i].strides());
          bits.add_(wide[i].view(at::kInt)).bitwise_and_(-(1 << 16));
          update.parameters[i].copy_(bits.view(at::kFloat));
          update.parameters[i].masked_fill_(wide[i].isnan(),
                                            std::numeric_limits<double>::quiet_NaN());  // adding overflows there
        }
      };
}

// x ^ (x >> shift), of numbers without a sign.
void xor_shifted(at::Tensor& x, int shift, int bits) {
  x.bitwise_xor_(x.bitwise_right_shift(shift).bitwise_and_((int64_t{1} << (bits - shift)) - 1));
}

// kernels::detail::mix64 and mix32 in a tensor's arithmetic, which wraps around.
void mix64(at::Tensor& x) {
  xor_shifted(x, 30, 64);
  x.mul_(static_cast<int64_t>(kernels::detail::kMultiplier64A));
  xor_shifted(x, 27, 64);
  x.mul_(static_cast<int64_t>(kernels::detail::kMultiplier64B));
  xor_shifted(x, 31, 64);
}

void mix32(at::Tensor& x) {
  xor_shifted(x, 16, 32);
  x.mul_(static_cast<int32_t>(kernels::detail::kMultiplier1));
  xor_shifted(x, 15, 32);
  x.mul_(static_cast<int32_t>(kernels::detail::kMultiplier2));
  xor_shifted(x, 16, 32);
}

}  // namespace

// As RandomKeys and random_bits() do it.
at::Tensor rounding_noise(const at::Tensor& step, uint64_t first, int64_t count) {
  const auto golden = static_cast<int64_t>(kernels::detail::kGolden);
  at::Tensor noise = at::arange(count, step.options().dtype(at::kInt));
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {  // elements whose numbers have the same upper half
    const uint64_t number = first + static_cast<uint64_t>(begin);
    const uint64_t left = (uint64_t{1} << 32) - (number & 0xFFFFFFFF);
    end = begin + static_cast<int64_t>(std::min(left, static_cast<uint64_t>(count - begin)));
    at::Tensor key = step.to(at::kLong) + static_cast<int64_t>(kernels::detail::mix64(kernels::detail::kGolden));
    mix64(key.add_(golden));
    mix64(key.add_(static_cast<int64_t>(number >> 32)).add_(golden));
    at::Tensor some = noise.slice(0, begin, end);
    some.add_(static_cast<int32_t>(static_cast<uint32_t>(number) - static_cast<uint32_t>(begin)));
    mix32(some.bitwise_xor_(key.to(at::kInt)));
    mix32(some.add_(key.bitwise_right_shift(32).to(at::kInt)));
  }
  return noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF);
}

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
