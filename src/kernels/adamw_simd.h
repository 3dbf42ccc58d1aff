// The arithmetic of AdamW on vectors of FP32. Compiled once per instruction set: included below <hwy/foreach_target.h>,
// hence this guard in place of #pragma once.
#if defined(SNUG_KERNELS_DETAIL_ADAMW_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SNUG_KERNELS_DETAIL_ADAMW_SIMD_H
#undef SNUG_KERNELS_DETAIL_ADAMW_SIMD_H
#else
#define SNUG_KERNELS_DETAIL_ADAMW_SIMD_H
#endif

#include "src/kernels/adamw_step.h"
#include "src/kernels/lanes.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

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
