// The arithmetic of AdamW on vectors of FP32. Compiled once per instruction set: included below <hwy/foreach_target.h>,
// hence this guard in place of #pragma once.
#if defined(SNUG_KERNELS_DETAIL_ADAMW_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SNUG_KERNELS_DETAIL_ADAMW_SIMD_H
#undef SNUG_KERNELS_DETAIL_ADAMW_SIMD_H
#else
#define SNUG_KERNELS_DETAIL_ADAMW_SIMD_H
#endif

#include <cmath>

#include <hwy/highway.h>

#include "src/kernels/adamw_step.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The constants of a step, computed in FP64 and rounded once, as torch does.
struct AdamWConstants {
  explicit AdamWConstants(const AdamWStep& step)
      : inverse_scale(step.inverse_scale),
        decay(static_cast<float>(1 - step.lr * step.weight_decay)),
        from_gradient(1 - step.beta1 < 0.5 ? 0.0f : 1.0f),
        exp_avg_weight(static_cast<float>(1 - step.beta1) - from_gradient),
        beta2(static_cast<float>(step.beta2)),
        one_minus_beta2(static_cast<float>(1 - step.beta2)),
        root_bias_correction2(static_cast<float>(std::sqrt(step.bias_correction2))),
        eps(static_cast<float>(step.eps)),
        negative_step_size(static_cast<float>(-(step.lr / step.bias_correction1))) {}

  float inverse_scale;
  float decay;
  float from_gradient;  // 1 where the mean is interpolated from the gradient: from the nearer end, as torch::lerp does
  float exp_avg_weight;
  float beta2;
  float one_minus_beta2;
  float root_bias_correction2;
  float eps;
  float negative_step_size;
};

/// One step for the elements of one vector. The gradient is still multiplied by the loss scale.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void adamw(D d, const AdamWConstants& c, V gradient, V& parameter, V& exp_avg, V& exp_avg_sq) {
  const V g = hn::Mul(gradient, hn::Set(d, c.inverse_scale));
  const V base = hn::IfThenElse(hn::Gt(hn::Set(d, c.from_gradient), hn::Zero(d)), g, exp_avg);
  exp_avg = hn::MulAdd(hn::Set(d, c.exp_avg_weight), hn::Sub(g, exp_avg), base);
  // Fused where LibTorch 2.13's own build fuses: with FP32 gradients and a loss scale that is a power of two the bits
  // are the same.
  exp_avg_sq = hn::MulAdd(hn::Mul(hn::Set(d, c.one_minus_beta2), g), g, hn::Mul(exp_avg_sq, hn::Set(d, c.beta2)));
  const V denominator = hn::Add(hn::Div(hn::Sqrt(exp_avg_sq), hn::Set(d, c.root_bias_correction2)), hn::Set(d, c.eps));
  parameter = hn::Add(hn::Mul(parameter, hn::Set(d, c.decay)),
                      hn::Div(hn::Mul(hn::Set(d, c.negative_step_size), exp_avg), denominator));
}

}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
