// One step of AdamW between decoding and rounding of the moments, for all kernels with moments of a byte. Included once
// per instruction set: see adamw_simd.h.
#if defined(SNUG_KERNELS_DETAIL_QUANTIZED_STEP_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SNUG_KERNELS_DETAIL_QUANTIZED_STEP_SIMD_H
#undef SNUG_KERNELS_DETAIL_QUANTIZED_STEP_SIMD_H
#else
#define SNUG_KERNELS_DETAIL_QUANTIZED_STEP_SIMD_H
#endif

#include <cmath>
#include <limits>

#include <hwy/highway.h>

#include "src/kernels/adamw_step.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The minimum and the maximum of numbers, at most one of them negative, compared as integers. Some processors, such
/// as Zen 5, have more units for integers, and the floating-point units limit these kernels.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V lesser(D d, V a, V b) {
  const hn::RebindToSigned<D> di;
  return hn::BitCast(d, hn::Min(hn::BitCast(di, a), hn::BitCast(di, b)));
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V greater(D d, V a, V b) {
  const hn::RebindToSigned<D> di;
  return hn::BitCast(d, hn::Max(hn::BitCast(di, a), hn::BitCast(di, b)));
}

/// A number with an infinite inverse becomes zero.
HWY_INLINE float inverse_of(float largest) { return largest > 1e-37f ? 1 / largest : 0.0f; }

/// The constants of a step, arranged for the fewest operations: not in torch's order, and not with torch's bits.
///   m = beta1 m + m_rate g,  v = beta2 v + (v_root g)^2,  p = decay p + m / (slope sqrt(v) + floor).
struct Factors {
  explicit Factors(const AdamWStep& step)
      : beta1(static_cast<float>(step.beta1)),
        beta2(static_cast<float>(step.beta2)),
        m_rate(static_cast<float>((1 - step.beta1) * step.inverse_scale)),
        v_root(static_cast<float>(std::sqrt(1 - step.beta2) * step.inverse_scale)),
        decay(static_cast<float>(1 - step.lr * step.weight_decay)) {
    const double inverse_lr = -step.bias_correction1 / step.lr;
    if (std::abs(inverse_lr) < kMostInverse) {
      slope = static_cast<float>(inverse_lr / std::sqrt(step.bias_correction2));
      floor = static_cast<float>(inverse_lr * step.eps);
    }
  }

  static constexpr double kMostInverse = 1e30;

  float beta1;
  float beta2;
  float m_rate;
  float v_root;
  float decay;
  // With a learning rate of zero nothing moves.
  float slope = 1;
  float floor = std::numeric_limits<float>::infinity();
};

/// One step for the elements of a vector. The moments come multiplied by beta1 and beta2. Returns the root of v.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V make_step(D d, const Factors& factors, V gradient, V& parameter, V& m, V& v) {
  m = hn::MulAdd(hn::Set(d, factors.m_rate), gradient, m);
  const V scaled = hn::Mul(hn::Set(d, factors.v_root), gradient);
  v = hn::MulAdd(scaled, scaled, v);
  const V root = hn::Sqrt(v);
  const V way = hn::Div(m, hn::MulAdd(hn::Set(d, factors.slope), root, hn::Set(d, factors.floor)));
  parameter = hn::MulAdd(hn::Set(d, factors.decay), parameter, way);
  return root;
}

}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
