#include "snug/kernels/detail/quantized_adamw.h"

#include <algorithm>
#include <cmath>
#include <limits>

// Compiles what follows once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "snug/kernels/detail/quantized_adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "snug/kernels/detail/dynamic_map_simd.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;

/// A number so small that its inverse is infinite becomes zero.
HWY_INLINE float inverse_of(float largest) { return largest > 1e-37f ? 1 / largest : 0.0f; }

/// The constants of a step, arranged for the fewest operations: not in torch's order, and not with its bits.
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

/// The moments of a block between decoding and rounding. They come multiplied by their betas.
struct Moments {
  HWY_ALIGN float m[kQuantizationBlock];
  HWY_ALIGN float v[kQuantizationBlock];
};

/// Updates a part of a block and says how large its moments have become, lane by lane.
template <class V>
HWY_INLINE void update_part(const Factors& factors, const float* gradient, float* parameter, float* exp_avg,
                            float* exp_avg_sq, V& m_largest, V& v_largest) {
  const D d;
  for (int64_t i = 0; i < kPart; i += static_cast<int64_t>(hn::Lanes(d))) {
    const V g = hn::LoadU(d, gradient + i);
    const V m = hn::MulAdd(hn::Set(d, factors.m_rate), g, hn::Load(d, exp_avg + i));
    const V root = hn::Mul(hn::Set(d, factors.v_root), g);
    const V v = hn::MulAdd(root, root, hn::Load(d, exp_avg_sq + i));
    const V way = hn::Div(m, hn::MulAdd(hn::Set(d, factors.slope), hn::Sqrt(v), hn::Set(d, factors.floor)));
    hn::StoreU(hn::MulAdd(hn::Set(d, factors.decay), hn::LoadU(d, parameter + i), way), d, parameter + i);
    hn::Store(m, d, exp_avg + i);
    hn::Store(v, d, exp_avg_sq + i);
    m_largest = greater(d, m_largest, hn::Abs(m));
    v_largest = greater(d, v_largest, v);
  }
}

struct Tensors {
  float* parameter;
  const float* gradient;
  uint8_t* exp_avg;
  uint8_t* exp_avg_sq;
  float* exp_avg_max;
  float* exp_avg_sq_max;
};

/// Updates block i and rounds the one before, part by part: together they keep all units of a processor busy.
template <bool kUpdate, bool kEncode>
HWY_INLINE void advance(const Factors& factors, const Tensors& tensors, int64_t i, Moments& now,
                        const Moments& before) {
  const D d;
  const int64_t begin = i * kQuantizationBlock;
  if constexpr (kUpdate) {
    decode_block<true>(tensors.exp_avg + begin, factors.beta1 * tensors.exp_avg_max[i], now.m);
    decode_block<false>(tensors.exp_avg_sq + begin, factors.beta2 * tensors.exp_avg_sq_max[i], now.v);
  }
  const float m_inverse = kEncode ? inverse_of(tensors.exp_avg_max[i - 1]) : 0;
  const float v_inverse = kEncode ? inverse_of(tensors.exp_avg_sq_max[i - 1]) : 0;
  auto m_largest = hn::Zero(d);
  auto v_largest = hn::Zero(d);
  for (int64_t part = 0; part < kQuantizationBlock; part += kPart) {
    if constexpr (kUpdate) {
      update_part(factors, tensors.gradient + begin + part, tensors.parameter + begin + part, now.m + part,
                  now.v + part, m_largest, v_largest);
    }
    if constexpr (kEncode) {
      const int64_t to = begin - kQuantizationBlock + part;
      encode_part<true>(before.m + part, m_inverse, tensors.exp_avg + to);
      encode_part<false>(before.v + part, v_inverse, tensors.exp_avg_sq + to);
    }
  }
  if constexpr (kUpdate) {
    tensors.exp_avg_max[i] = hn::GetLane(hn::MaxOfLanes(d, m_largest));
    tensors.exp_avg_sq_max[i] = hn::GetLane(hn::MaxOfLanes(d, v_largest));
  }
}

/// Takes copies, which the compiler knows that no store changes.
void update_blocks(Factors factors, Tensors tensors, int64_t count) {
  Moments moments[2];
  advance<true, false>(factors, tensors, 0, moments[0], moments[1]);
  for (int64_t i = 1; i < count; ++i) {
    advance<true, true>(factors, tensors, i, moments[i % 2], moments[1 - i % 2]);
  }
  advance<false, true>(factors, tensors, count, moments[count % 2], moments[1 - count % 2]);
}

/// The rest, in a block filled up with zeros.
void update_rest(const Factors& factors, const Tensors& rest, int64_t count) {
  float p[kQuantizationBlock] = {};
  float g[kQuantizationBlock] = {};
  uint8_t m[kQuantizationBlock];
  uint8_t v[kQuantizationBlock] = {};
  std::fill_n(m, kQuantizationBlock, uint8_t{127});
  std::copy_n(rest.parameter, count, p);
  std::copy_n(rest.gradient, count, g);
  std::copy_n(rest.exp_avg, count, m);
  std::copy_n(rest.exp_avg_sq, count, v);
  update_blocks(factors, {p, g, m, v, rest.exp_avg_max, rest.exp_avg_sq_max}, 1);
  std::copy_n(p, count, rest.parameter);
  std::copy_n(m, count, rest.exp_avg);
  std::copy_n(v, count, rest.exp_avg_sq);
}

void update(const AdamWStep& step, float* parameter, const float* gradient, uint8_t* exp_avg, uint8_t* exp_avg_sq,
            float* exp_avg_max, float* exp_avg_sq_max, int64_t count) {
  const Factors factors(step);
  const int64_t blocks = count / kQuantizationBlock;
  const int64_t done = blocks * kQuantizationBlock;
  if (blocks > 0) {
    update_blocks(factors, {parameter, gradient, exp_avg, exp_avg_sq, exp_avg_max, exp_avg_sq_max}, blocks);
  }
  if (count > done) {
    update_rest(factors,
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
    encode_block<kSigned>(block, inverse_of(largest), block_codes);
    std::copy_n(block_codes, n, codes);
    *maxima++ = largest;
    values += n;
    codes += n;
  }
}

template <bool kSigned>
void dequantize_all(const uint8_t* codes, const float* maxima, float* values, int64_t count) {
  for (; count > 0; count -= kQuantizationBlock) {
    const int64_t n = std::min(count, kQuantizationBlock);
    HWY_ALIGN float block[kQuantizationBlock];
    uint8_t block_codes[kQuantizationBlock] = {};
    std::copy_n(codes, n, block_codes);
    decode_block<kSigned>(block_codes, *maxima++, block);
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
