#include "src/kernels/master_adamw.h"

#include <algorithm>

#include "src/kernels/random_bits.h"

// Compiles what follows once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/master_adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "src/kernels/master_adamw_simd.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// With masters.

template <class Half>
HWY_INLINE void master_update(const AdamWStep& step, float* master, Half* parameter, const Half* gradient,
                              float* exp_avg, float* exp_avg_sq, int64_t count) {
  const AdamWConstants constants(step);
  int64_t i = 0;
  for (; i + lanes() <= count; i += lanes()) {
    master_vector(constants, master + i, parameter + i, gradient + i, exp_avg + i, exp_avg_sq + i);
  }
  if (const int64_t n = count - i; n > 0) {
    Rest p(master + i, n);
    Rest rounded(parameter + i, n);
    Rest g(gradient + i, n);
    Rest m(exp_avg + i, n);
    Rest v(exp_avg_sq + i, n);
    master_vector(constants, p.values, rounded.values, g.values, m.values, v.values);
    p.back(master + i, n);
    rounded.back(parameter + i, n);
    m.back(exp_avg + i, n);
    v.back(exp_avg_sq + i, n);
  }
}

// Without masters.

/// Elements whose indices share their upper 32 bits.
HWY_INLINE void stochastic_part(const AdamWConstants& constants, const detail::RandomKeys& keys, uint32_t index,
                                BFloat16* parameter, const BFloat16* gradient, float* exp_avg, float* exp_avg_sq,
                                int64_t count) {
  int64_t i = 0;
  for (; i + lanes() <= count; i += lanes()) {
    stochastic_vector(constants, keys, index, parameter + i, gradient + i, exp_avg + i, exp_avg_sq + i);
    index += static_cast<uint32_t>(lanes());
  }
  if (const int64_t n = count - i; n > 0) {
    Rest p(parameter + i, n);
    Rest g(gradient + i, n);
    Rest m(exp_avg + i, n);
    Rest v(exp_avg_sq + i, n);
    stochastic_vector(constants, keys, index, p.values, g.values, m.values, v.values);
    p.back(parameter + i, n);
    m.back(exp_avg + i, n);
    v.back(exp_avg_sq + i, n);
  }
}

HWY_INLINE void stochastic_update(const AdamWStep& step, const RandomKey& key, BFloat16* parameter,
                                  const BFloat16* gradient, float* exp_avg, float* exp_avg_sq, int64_t count) {
  const AdamWConstants constants(step);
  for (int64_t i = 0; i < count;) {
    const uint64_t index = key.offset + static_cast<uint64_t>(i);
    const auto low = static_cast<uint32_t>(index);
    const int64_t part = std::min(count - i, (int64_t{1} << 32) - low);
    stochastic_part(constants, detail::RandomKeys(key, index >> 32), low, parameter + i, gradient + i, exp_avg + i,
                    exp_avg_sq + i, part);
    i += part;
  }
}

// One function per type, for the tables of instruction sets.

void master_half(const AdamWStep& step, float* master, Float16* parameter, const Float16* gradient, float* m, float* v,
                 int64_t count) {
  master_update(step, master, parameter, gradient, m, v, count);
}
void master_bfloat(const AdamWStep& step, float* master, BFloat16* parameter, const BFloat16* gradient, float* m,
                   float* v, int64_t count) {
  master_update(step, master, parameter, gradient, m, v, count);
}
void stochastic(const AdamWStep& step, const RandomKey& key, BFloat16* parameter, const BFloat16* gradient, float* m,
                float* v, int64_t count) {
  stochastic_update(step, key, parameter, gradient, m, v, count);
}

}  // namespace
}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace snug::kernels {

HWY_EXPORT(master_half);
HWY_EXPORT(master_bfloat);
HWY_EXPORT(stochastic);

void master_adamw_update(const AdamWStep& step, float* master, Float16* parameter, const Float16* gradient,
                         float* exp_avg, float* exp_avg_sq, int64_t count) {
  HWY_DYNAMIC_DISPATCH(master_half)(step, master, parameter, gradient, exp_avg, exp_avg_sq, count);
}
void master_adamw_update(const AdamWStep& step, float* master, BFloat16* parameter, const BFloat16* gradient,
                         float* exp_avg, float* exp_avg_sq, int64_t count) {
  HWY_DYNAMIC_DISPATCH(master_bfloat)(step, master, parameter, gradient, exp_avg, exp_avg_sq, count);
}

void stochastic_adamw_update(const AdamWStep& step, const RandomKey& key, BFloat16* parameter, const BFloat16* gradient,
                             float* exp_avg, float* exp_avg_sq, int64_t count) {
  HWY_DYNAMIC_DISPATCH(stochastic)(step, key, parameter, gradient, exp_avg, exp_avg_sq, count);
}

}  // namespace snug::kernels
#endif
