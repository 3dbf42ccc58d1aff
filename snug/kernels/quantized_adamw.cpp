#include "snug/kernels/quantized_adamw.h"

#include <algorithm>

// Compiles what follows once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "snug/kernels/quantized_adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "snug/kernels/detail/adamw_simd.h"
#include "snug/kernels/detail/dynamic_map_simd.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;

/// What is so small that its inverse is infinite becomes zero.
HWY_INLINE float inverse_of(float largest) { return largest > 1e-37f ? 1 / largest : 0.0f; }

/// Rounds a block that lies in `values` and returns its largest magnitude.
template <bool kSigned>
HWY_INLINE void encode_block(const float* values, float largest, uint8_t* codes) {
  const D d;
  const auto inverse = hn::Set(d, inverse_of(largest));
  for (int64_t i = 0; i < kQuantizationBlock; i += static_cast<int64_t>(hn::Lanes(d))) {
    encode<kSigned>(d, hn::Load(d, values + i), inverse, codes + i);
  }
}

/// A block between its update and its rounding, for which its largest magnitudes must be known.
struct Pending {
  HWY_ALIGN float m[kQuantizationBlock];
  HWY_ALIGN float v[kQuantizationBlock];
  float m_inverse;
  float v_inverse;
};

struct Block {
  float* parameter;
  const float* gradient;
  uint8_t* exp_avg;
  uint8_t* exp_avg_sq;
  float* exp_avg_max;
  float* exp_avg_sq_max;

  void next() {
    parameter += kQuantizationBlock;
    gradient += kQuantizationBlock;
    exp_avg += kQuantizationBlock;
    exp_avg_sq += kQuantizationBlock;
    ++exp_avg_max;
    ++exp_avg_sq_max;
  }
};

/// Updates one block and rounds the one before, in one loop: together they keep all units of a processor busy.
template <bool kUpdate, bool kEncode>
HWY_INLINE void advance(const AdamWConstants& constants, const Block& block, Pending& updated, const Pending& before) {
  const D d;
  const auto m_scale = hn::Set(d, kUpdate ? *block.exp_avg_max : 0.0f);
  const auto v_scale = hn::Set(d, kUpdate ? *block.exp_avg_sq_max : 0.0f);
  const auto m_inverse = hn::Set(d, kEncode ? before.m_inverse : 0.0f);
  const auto v_inverse = hn::Set(d, kEncode ? before.v_inverse : 0.0f);
  auto m_largest = hn::Zero(d);
  auto v_largest = hn::Zero(d);
  for (int64_t i = 0; i < kQuantizationBlock; i += static_cast<int64_t>(hn::Lanes(d))) {
    if constexpr (kUpdate) {
      auto m = hn::Mul(decode<true>(d, block.exp_avg + i), m_scale);
      auto v = hn::Mul(decode<false>(d, block.exp_avg_sq + i), v_scale);
      auto p = hn::LoadU(d, block.parameter + i);
      adamw(d, constants, hn::LoadU(d, block.gradient + i), p, m, v);
      hn::StoreU(p, d, block.parameter + i);
      hn::Store(m, d, updated.m + i);
      hn::Store(v, d, updated.v + i);
      m_largest = hn::Max(m_largest, hn::Abs(m));
      v_largest = hn::Max(v_largest, v);
    }
    if constexpr (kEncode) {
      encode<true>(d, hn::Load(d, before.m + i), m_inverse, block.exp_avg - kQuantizationBlock + i);
      encode<false>(d, hn::Load(d, before.v + i), v_inverse, block.exp_avg_sq - kQuantizationBlock + i);
    }
  }
  if constexpr (kUpdate) {
    *block.exp_avg_max = hn::GetLane(hn::MaxOfLanes(d, m_largest));
    *block.exp_avg_sq_max = hn::GetLane(hn::MaxOfLanes(d, v_largest));
    updated.m_inverse = inverse_of(*block.exp_avg_max);
    updated.v_inverse = inverse_of(*block.exp_avg_sq_max);
  }
}

void update_blocks(const AdamWConstants& constants, Block block, int64_t count) {
  Pending pending[2];
  advance<true, false>(constants, block, pending[0], pending[1]);
  block.next();
  for (int64_t i = 1; i < count; ++i) {
    advance<true, true>(constants, block, pending[i % 2], pending[1 - i % 2]);
    block.next();
  }
  advance<false, true>(constants, block, pending[count % 2], pending[1 - count % 2]);
}

/// The rest, in a block filled up with zeros.
void update_rest(const AdamWConstants& constants, const Block& rest, int64_t count) {
  float p[kQuantizationBlock] = {};
  float g[kQuantizationBlock] = {};
  uint8_t m[kQuantizationBlock];
  uint8_t v[kQuantizationBlock] = {};
  std::fill_n(m, kQuantizationBlock, uint8_t{127});
  std::copy_n(rest.parameter, count, p);
  std::copy_n(rest.gradient, count, g);
  std::copy_n(rest.exp_avg, count, m);
  std::copy_n(rest.exp_avg_sq, count, v);
  update_blocks(constants, {p, g, m, v, rest.exp_avg_max, rest.exp_avg_sq_max}, 1);
  std::copy_n(p, count, rest.parameter);
  std::copy_n(m, count, rest.exp_avg);
  std::copy_n(v, count, rest.exp_avg_sq);
}

void update(const AdamWStep& step, float* parameter, const float* gradient, uint8_t* exp_avg, uint8_t* exp_avg_sq,
            float* exp_avg_max, float* exp_avg_sq_max, int64_t count) {
  const AdamWConstants constants(step);
  const int64_t blocks = count / kQuantizationBlock;
  const int64_t done = blocks * kQuantizationBlock;
  if (blocks > 0) {
    update_blocks(constants, {parameter, gradient, exp_avg, exp_avg_sq, exp_avg_max, exp_avg_sq_max}, blocks);
  }
  if (count > done) {
    update_rest(constants,
                {parameter + done, gradient + done, exp_avg + done, exp_avg_sq + done, exp_avg_max + blocks,
                 exp_avg_sq_max + blocks},
                count - done);
  }
}

template <bool kSigned>
void quantize_all(const float* values, uint8_t* codes, float* maxima, int64_t count) {
  for (; count > 0; count -= kQuantizationBlock) {
    const int64_t n = std::min(count, kQuantizationBlock);
    HWY_ALIGN float block[kQuantizationBlock] = {};
    uint8_t block_codes[kQuantizationBlock];
    std::copy_n(values, n, block);
    float largest = 0;
    for (const float value : block) {
      largest = std::max(largest, value < 0 ? -value : value);
    }
    encode_block<kSigned>(block, largest, block_codes);
    std::copy_n(block_codes, n, codes);
    *maxima++ = largest;
    values += n;
    codes += n;
  }
}

template <bool kSigned>
void dequantize_all(const uint8_t* codes, const float* maxima, float* values, int64_t count) {
  const D d;
  for (; count > 0; count -= kQuantizationBlock) {
    const int64_t n = std::min(count, kQuantizationBlock);
    HWY_ALIGN float block[kQuantizationBlock];
    uint8_t block_codes[kQuantizationBlock] = {};
    std::copy_n(codes, n, block_codes);
    const auto scale = hn::Set(d, *maxima++);
    for (int64_t i = 0; i < kQuantizationBlock; i += static_cast<int64_t>(hn::Lanes(d))) {
      hn::Store(hn::Mul(decode<kSigned>(d, block_codes + i), scale), d, block + i);
    }
    std::copy_n(block, n, values);
    values += n;
    codes += n;
  }
}

void quantize_signed(const float* values, uint8_t* codes, float* maxima, int64_t count) {
  quantize_all<true>(values, codes, maxima, count);
}
void quantize_unsigned(const float* values, uint8_t* codes, float* maxima, int64_t count) {
  quantize_all<false>(values, codes, maxima, count);
}
void dequantize_signed(const uint8_t* codes, const float* maxima, float* values, int64_t count) {
  dequantize_all<true>(codes, maxima, values, count);
}
void dequantize_unsigned(const uint8_t* codes, const float* maxima, float* values, int64_t count) {
  dequantize_all<false>(codes, maxima, values, count);
}

}  // namespace
}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace snug::kernels {

HWY_EXPORT(update);
HWY_EXPORT(quantize_signed);
HWY_EXPORT(quantize_unsigned);
HWY_EXPORT(dequantize_signed);
HWY_EXPORT(dequantize_unsigned);

void adamw8bit_update(const AdamWStep& step, float* parameter, const float* gradient, uint8_t* exp_avg,
                      uint8_t* exp_avg_sq, float* exp_avg_max, float* exp_avg_sq_max, int64_t count) {
  HWY_DYNAMIC_DISPATCH(update)(step, parameter, gradient, exp_avg, exp_avg_sq, exp_avg_max, exp_avg_sq_max, count);
}

void quantize(DynamicCode code, const float* values, uint8_t* codes, float* maxima, int64_t count) {
  if (code == DynamicCode::kSigned) {
    HWY_DYNAMIC_DISPATCH(quantize_signed)(values, codes, maxima, count);
  } else {
    HWY_DYNAMIC_DISPATCH(quantize_unsigned)(values, codes, maxima, count);
  }
}

void dequantize(DynamicCode code, const uint8_t* codes, const float* maxima, float* values, int64_t count) {
  if (code == DynamicCode::kSigned) {
    HWY_DYNAMIC_DISPATCH(dequantize_signed)(codes, maxima, values, count);
  } else {
    HWY_DYNAMIC_DISPATCH(dequantize_unsigned)(codes, maxima, values, count);
  }
}

}  // namespace snug::kernels
#endif
