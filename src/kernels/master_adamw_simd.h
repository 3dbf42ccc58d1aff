// A step of AdamW for the elements of one vector in memory: FP32 parameters, and parameters of 16 bits with masters or
// with stochastic rounding. Included once per instruction set: see adamw_simd.h.
#if defined(SNUG_KERNELS_DETAIL_MASTER_ADAMW_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SNUG_KERNELS_DETAIL_MASTER_ADAMW_SIMD_H
#undef SNUG_KERNELS_DETAIL_MASTER_ADAMW_SIMD_H
#else
#define SNUG_KERNELS_DETAIL_MASTER_ADAMW_SIMD_H
#endif

#include <cstdint>

#include "src/kernels/adamw_simd.h"
#include "src/kernels/half_simd.h"
#include "src/kernels/lanes.h"
#include "src/kernels/random_bits.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class Half>
HWY_INLINE void master_vector(const AdamWConstants& constants, float* master, Half* parameter, const Half* gradient,
                              float* exp_avg, float* exp_avg_sq) {
  const hn::ScalableTag<float> d;
  auto p = hn::LoadU(d, master);
  auto m = hn::LoadU(d, exp_avg);
  auto v = hn::LoadU(d, exp_avg_sq);
  adamw(d, constants, load(d, gradient), p, m, v);
  hn::StoreU(p, d, master);
  hn::StoreU(m, d, exp_avg);
  hn::StoreU(v, d, exp_avg_sq);
  store(d, p, parameter);
}

/// The random numbers of consecutive elements: see detail::RandomKeys.
HWY_INLINE hn::Vec<hn::ScalableTag<uint32_t>> random_vector(const detail::RandomKeys& keys, uint32_t index) {
  const hn::ScalableTag<uint32_t> du;
  auto x = hn::Xor(hn::Iota(du, index), hn::Set(du, keys.first));
  for (int round = 0; round < 2; ++round) {
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(du, detail::kMultiplier1));
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(du, detail::kMultiplier2));
    x = hn::Xor(x, hn::ShiftRight<16>(x));
    x = round == 0 ? hn::Add(x, hn::Set(du, keys.second)) : x;
  }
  return x;
}

HWY_INLINE void stochastic_vector(const AdamWConstants& constants, const detail::RandomKeys& keys, uint32_t index,
                                  BFloat16* parameter, const BFloat16* gradient, float* exp_avg, float* exp_avg_sq) {
  const hn::ScalableTag<float> d;
  auto p = load(d, parameter);
  auto m = hn::LoadU(d, exp_avg);
  auto v = hn::LoadU(d, exp_avg_sq);
  adamw(d, constants, load(d, gradient), p, m, v);
  hn::StoreU(m, d, exp_avg);
  hn::StoreU(v, d, exp_avg_sq);
  store_stochastic(d, p, random_vector(keys, index), parameter);
}

}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
