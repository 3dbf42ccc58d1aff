#include "snug/kernels/detail/compact_adamw.h"

#include <algorithm>
#include <cmath>

// Compiles what follows once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "snug/kernels/detail/compact_adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "snug/kernels/detail/compact_wide_simd.h"
#include "snug/kernels/detail/quantized_step_simd.h"
#include "snug/kernels/detail/split_weights_simd.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<D>;
using D8I = hn::Rebind<int8_t, D>;
using D8U = hn::Rebind<uint8_t, D>;
using Float = hn::Vec<D>;

constexpr float kSteps1 = 127;
constexpr float kSteps2 = 255;
constexpr float kLeastScale = 1e-37f;  // to divide by, so that a block of zeros has codes of zero

int64_t lanes() { return static_cast<int64_t>(hn::Lanes(D())); }

/// The inverse of z = 2 x / (1 + |x|) is z / (2 - |z|).
HWY_INLINE Float expand_first(const int8_t* codes, Float scale) {
  const D d;
  const auto code = hn::ConvertTo(d, hn::PromoteTo(DI(), hn::LoadU(D8I(), codes)));
  return hn::Mul(hn::Div(code, hn::Sub(hn::Set(d, 2 * kSteps1), hn::Abs(code))), scale);
}

/// `scale` is the block's, but at least kLeastScale.
HWY_INLINE void compand_first(Float m, Float scale, int8_t* codes) {
  const D d;
  const auto code = hn::Div(hn::Mul(m, hn::Set(d, 2 * kSteps1)), hn::Add(hn::Abs(m), scale));
  hn::StoreU(hn::DemoteTo(D8I(), hn::NearestInt(code)), D8I(), codes);
}

/// The root of the second moment. `step` is a 255th of the block's scale.
HWY_INLINE Float expand_second(const uint8_t* codes, Float step) {
  const D d;
  return hn::Mul(hn::ConvertTo(d, hn::PromoteTo(DI(), hn::LoadU(D8U(), codes))), step);
}

/// `inverse` is that of the step.
HWY_INLINE void compand_second(Float root, Float inverse, uint8_t* codes) {
  const DI di;
  const auto code = hn::NearestInt(hn::Mul(root, inverse));
  const auto bits = hn::BitCast(di, root);  // at least 1 if the root is above zero
  hn::StoreU(hn::DemoteTo(D8U(), hn::Max(code, hn::Min(bits, hn::Set(di, 1)))), D8U(), codes);
}

#if HWY_CAP_GE512

/// Updates a block.
HWY_INLINE void update_block(const Factors& factors, const CompactAdamWTensors& block) {
  const D d;
  Four p = load_split_four(block.parameter, block.correction);
  const Four g = load_four(block.gradient);
  Four m = load_codes(block.exp_avg);
  Four root = load_codes(block.exp_avg_sq);
  const auto m_scale = hn::Set(d, factors.beta1 * *block.exp_avg_scale);
  const auto root_step = hn::Set(d, std::sqrt(factors.beta2) * *block.exp_avg_sq_scale / kSteps2);
  auto m_largest = hn::Zero(d);
  auto root_largest = hn::Zero(d);
  for (int i = 0; i < 4; ++i) {
    const auto code = m.at[i];  // times 2^24, as is what it is subtracted from
    m.at[i] = hn::Mul(hn::Div(code, hn::Sub(hn::Set(d, 0x1p25f * kSteps1), hn::Abs(code))), m_scale);
    const auto root_before = hn::Mul(root.at[i], root_step);
    auto v = hn::Mul(root_before, root_before);
    root.at[i] = make_step(d, factors, g.at[i], p.at[i], m.at[i], v);
    m_largest = greater(d, m_largest, hn::Abs(m.at[i]));
    root_largest = greater(d, root_largest, root.at[i]);
  }
  store_split_four(p, block.parameter, block.correction);
  const float m_most = hn::GetLane(hn::MaxOfLanes(d, m_largest));
  const float root_most = hn::GetLane(hn::MaxOfLanes(d, root_largest));
  *block.exp_avg_scale = m_most;
  *block.exp_avg_sq_scale = root_most;
  const auto divisor = hn::Set(d, std::max(m_most, kLeastScale));
  const auto inverse = hn::Set(d, kSteps2 * inverse_of(root_most));
  Four codes;
  for (int i = 0; i < 4; ++i) {
    m.at[i] = hn::Div(hn::Mul(m.at[i], hn::Set(d, 2 * kSteps1)), hn::Add(hn::Abs(m.at[i]), divisor));
    codes.at[i] = hn::Mul(root.at[i], inverse);
  }
  store_codes(m, block.exp_avg);
  store_codes(codes, root, block.exp_avg_sq);
}

#else

/// A block between the step and the rounding of its moments.
struct Moments {
  HWY_ALIGN float m[kCompandingBlock];
  HWY_ALIGN float root[kCompandingBlock];
};

/// Updates a block's weights, and its scales.
HWY_INLINE void update_weights(const Factors& factors, const CompactAdamWTensors& block, Moments& moments) {
  const D d;
  const auto m_scale = hn::Set(d, factors.beta1 * *block.exp_avg_scale);
  const auto root_step = hn::Set(d, std::sqrt(factors.beta2) * *block.exp_avg_sq_scale / kSteps2);
  auto m_largest = hn::Zero(d);
  auto root_largest = hn::Zero(d);
  for (int64_t i = 0; i < kCompandingBlock; i += lanes()) {
    auto p = load_split(d, block.parameter + i, block.correction + i);
    auto m = expand_first(block.exp_avg + i, m_scale);
    const auto root_before = expand_second(block.exp_avg_sq + i, root_step);
    auto v = hn::Mul(root_before, root_before);
    const auto root = make_step(d, factors, load(d, block.gradient + i), p, m, v);
    store_split(d, p, block.parameter + i, block.correction + i);
    hn::Store(m, d, moments.m + i);
    hn::Store(root, d, moments.root + i);
    m_largest = greater(d, m_largest, hn::Abs(m));
    root_largest = greater(d, root_largest, root);
  }
  *block.exp_avg_scale = hn::GetLane(hn::MaxOfLanes(d, m_largest));
  *block.exp_avg_sq_scale = hn::GetLane(hn::MaxOfLanes(d, root_largest));
}

HWY_INLINE void compand_block(const Moments& moments, const CompactAdamWTensors& block) {
  const D d;
  const auto m_scale = hn::Set(d, std::max(*block.exp_avg_scale, kLeastScale));
  const auto step_inverse = hn::Set(d, kSteps2 * inverse_of(*block.exp_avg_sq_scale));
  for (int64_t i = 0; i < kCompandingBlock; i += lanes()) {
    compand_first(hn::Load(d, moments.m + i), m_scale, block.exp_avg + i);
    compand_second(hn::Load(d, moments.root + i), step_inverse, block.exp_avg_sq + i);
  }
}

HWY_INLINE void update_block(const Factors& factors, const CompactAdamWTensors& block) {
  Moments moments;
  update_weights(factors, block, moments);
  compand_block(moments, block);
}

#endif

/// The rest, in a block filled up with zeros.
void update_rest(const Factors& factors, const CompactAdamWTensors& rest, int64_t count) {
  BFloat16 p[kCompandingBlock] = {};
  BFloat16 g[kCompandingBlock] = {};
  int8_t correction[kCompandingBlock] = {};
  int8_t m[kCompandingBlock] = {};
  uint8_t v[kCompandingBlock] = {};
  std::copy_n(rest.parameter, count, p);
  std::copy_n(rest.correction, count, correction);
  std::copy_n(rest.gradient, count, g);
  std::copy_n(rest.exp_avg, count, m);
  std::copy_n(rest.exp_avg_sq, count, v);
  const CompactAdamWTensors block{p, correction, g, m, v, rest.exp_avg_scale, rest.exp_avg_sq_scale};
  update_block(factors, block);
  std::copy_n(p, count, rest.parameter);
  std::copy_n(correction, count, rest.correction);
  std::copy_n(m, count, rest.exp_avg);
  std::copy_n(v, count, rest.exp_avg_sq);
}

void update(const AdamWStep& step, const CompactAdamWTensors& tensors, int64_t count) {
  const Factors factors(step);
  const int64_t whole = count / kCompandingBlock * kCompandingBlock;
  for (int64_t i = 0; i < whole; i += kCompandingBlock) {
    update_block(factors, tensors.from(i));
  }
  if (count > whole) {
    update_rest(factors, tensors.from(whole), count - whole);
  }
}

// Conversions alone. `begin` is where a block begins.

template <class From, class To, class Convert>
HWY_INLINE void convert_blocks(const From* from, To* to, int64_t count, const Convert& convert) {
  for (int64_t begin = 0; begin < count; begin += kCompandingBlock) {
    const int64_t n = std::min(count - begin, kCompandingBlock);
    HWY_ALIGN From in[kCompandingBlock] = {};
    HWY_ALIGN To out[kCompandingBlock];
    std::copy_n(from + begin, n, in);
    convert(in, out, begin / kCompandingBlock);
    std::copy_n(out, n, to + begin);
  }
}

void compand_first_all(const float* m, int8_t* codes, float* scales, int64_t count) {
  convert_blocks(m, codes, count, [&](const float* in, int8_t* out, int64_t block) HWY_ATTR {
    float largest = 0;
    for (int64_t i = 0; i < kCompandingBlock; ++i) {
      largest = std::max(largest, std::abs(in[i]));
    }
    scales[block] = largest;
    for (int64_t i = 0; i < kCompandingBlock; i += lanes()) {
      compand_first(hn::Load(D(), in + i), hn::Set(D(), std::max(largest, kLeastScale)), out + i);
    }
  });
}

void compand_second_all(const float* v, uint8_t* codes, float* scales, int64_t count) {
  convert_blocks(v, codes, count, [&](const float* in, uint8_t* out, int64_t block) HWY_ATTR {
    float largest = 0;
    for (int64_t i = 0; i < kCompandingBlock; ++i) {
      largest = std::max(largest, std::sqrt(in[i]));
    }
    scales[block] = largest;
    for (int64_t i = 0; i < kCompandingBlock; i += lanes()) {
      compand_second(hn::Sqrt(hn::Load(D(), in + i)), hn::Set(D(), kSteps2 * inverse_of(largest)), out + i);
    }
  });
}

void expand_first_all(const int8_t* codes, const float* scales, float* m, int64_t count) {
  convert_blocks(codes, m, count, [&](const int8_t* in, float* out, int64_t block) HWY_ATTR {
    for (int64_t i = 0; i < kCompandingBlock; i += lanes()) {
      hn::Store(expand_first(in + i, hn::Set(D(), scales[block])), D(), out + i);
    }
  });
}

void expand_second_all(const uint8_t* codes, const float* scales, float* v, int64_t count) {
  convert_blocks(codes, v, count, [&](const uint8_t* in, float* out, int64_t block) HWY_ATTR {
    for (int64_t i = 0; i < kCompandingBlock; i += lanes()) {
      const auto root = expand_second(in + i, hn::Set(D(), scales[block] / kSteps2));
      hn::Store(hn::Mul(root, root), D(), out + i);
    }
  });
}

}  // namespace
}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace snug::kernels {

HWY_EXPORT(update);
HWY_EXPORT(compand_first_all);
HWY_EXPORT(compand_second_all);
HWY_EXPORT(expand_first_all);
HWY_EXPORT(expand_second_all);

void compact_adamw_update(const AdamWStep& step, const CompactAdamWTensors& tensors, int64_t count) {
  HWY_DYNAMIC_DISPATCH(update)(step, tensors, count);
}
void compand_exp_avg(const float* exp_avg, int8_t* codes, float* scales, int64_t count) {
  HWY_DYNAMIC_DISPATCH(compand_first_all)(exp_avg, codes, scales, count);
}
void compand_exp_avg_sq(const float* exp_avg_sq, uint8_t* codes, float* scales, int64_t count) {
  HWY_DYNAMIC_DISPATCH(compand_second_all)(exp_avg_sq, codes, scales, count);
}
void expand_exp_avg(const int8_t* codes, const float* scales, float* exp_avg, int64_t count) {
  HWY_DYNAMIC_DISPATCH(expand_first_all)(codes, scales, exp_avg, count);
}
void expand_exp_avg_sq(const uint8_t* codes, const float* scales, float* exp_avg_sq, int64_t count) {
  HWY_DYNAMIC_DISPATCH(expand_second_all)(codes, scales, exp_avg_sq, count);
}

}  // namespace snug::kernels
#endif
