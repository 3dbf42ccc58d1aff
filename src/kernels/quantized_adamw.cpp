#include "src/kernels/quantized_adamw.h"

#include <algorithm>

// Compiles the code below once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/quantized_adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "src/kernels/dynamic_map_simd.h"
#include "src/kernels/quantized_step_simd.h"
#include "src/kernels/split_weights_simd.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;

/// The moments of a block between decoding and rounding, multiplied by beta1 and beta2.
struct Moments {
  HWY_ALIGN float m[kQuantizationBlock];
  HWY_ALIGN float v[kQuantizationBlock];
};

/// Where weights and gradients lie: in FP32, or, below, in BF16 with a byte of correction.
struct FullWeights {
  float* parameter;
  const float* gradient;

  FullWeights from(int64_t begin) const { return {parameter + begin, gradient + begin}; }
  HWY_INLINE hn::Vec<D> load_weight(int64_t i) const { return hn::LoadU(D(), parameter + i); }
  HWY_INLINE hn::Vec<D> load_gradient(int64_t i) const { return hn::LoadU(D(), gradient + i); }
  HWY_INLINE void store_weight(hn::Vec<D> weight, int64_t i) const { hn::StoreU(weight, D(), parameter + i); }

  /// A block filled up with zeros.
  struct Rest {
    float parameter[kQuantizationBlock] = {};
    float gradient[kQuantizationBlock] = {};
    Rest(const FullWeights& from, int64_t count) {
      std::copy_n(from.parameter, count, parameter);
      std::copy_n(from.gradient, count, gradient);
    }
    FullWeights weights() { return {parameter, gradient}; }
    void back(const FullWeights& to, int64_t count) const { std::copy_n(parameter, count, to.parameter); }
  };
};

struct SplitWeights {
  BFloat16* rounded;
  int8_t* correction;
  const BFloat16* gradient;

  SplitWeights from(int64_t begin) const { return {rounded + begin, correction + begin, gradient + begin}; }
  HWY_INLINE hn::Vec<D> load_weight(int64_t i) const { return load_split(D(), rounded + i, correction + i); }
  HWY_INLINE hn::Vec<D> load_gradient(int64_t i) const { return load(D(), gradient + i); }
  HWY_INLINE void store_weight(hn::Vec<D> weight, int64_t i) const {
    store_split(D(), weight, rounded + i, correction + i);
  }

  struct Rest {
    BFloat16 rounded[kQuantizationBlock] = {};
    int8_t correction[kQuantizationBlock] = {};
    BFloat16 gradient[kQuantizationBlock] = {};
    Rest(const SplitWeights& from, int64_t count) {
      std::copy_n(from.rounded, count, rounded);
      std::copy_n(from.correction, count, correction);
      std::copy_n(from.gradient, count, gradient);
    }
    SplitWeights weights() { return {rounded, correction, gradient}; }
    void back(const SplitWeights& to, int64_t count) const {
      std::copy_n(rounded, count, to.rounded);
      std::copy_n(correction, count, to.correction);
    }
  };
};

/// Updates a part of a block and says how large the part's moments have become, lane by lane.
template <class Weights, class V>
HWY_INLINE void update_part(const Factors& factors, const Weights& weights, float* exp_avg, float* exp_avg_sq,
                            V& m_largest, V& v_largest) {
  const D d;
  for (int64_t i = 0; i < kPart; i += static_cast<int64_t>(hn::Lanes(d))) {
    V p = weights.load_weight(i);
    V m = hn::Load(d, exp_avg + i);
    V v = hn::Load(d, exp_avg_sq + i);
    make_step(d, factors, weights.load_gradient(i), p, m, v);
    weights.store_weight(p, i);
    hn::Store(m, d, exp_avg + i);
    hn::Store(v, d, exp_avg_sq + i);
    m_largest = greater(d, m_largest, hn::Abs(m));
    v_largest = greater(d, v_largest, v);
  }
}

template <class Weights>
struct Tensors {
  Weights weights;
  EightBitMoments moments;
};

/// Updates block i and rounds block i - 1, part by part: together both keep all units of a processor busy.
template <bool kUpdate, bool kEncode, class Weights>
HWY_INLINE void advance(const Factors& factors, const Tensors<Weights>& tensors, int64_t i, Moments& now,
                        const Moments& before) {
  const D d;
  const EightBitMoments& state = tensors.moments;
  const int64_t begin = i * kQuantizationBlock;
  if constexpr (kUpdate) {
    decode_block<true>(state.exp_avg + begin, factors.beta1 * state.exp_avg_max[i], now.m);
    decode_block<false>(state.exp_avg_sq + begin, factors.beta2 * state.exp_avg_sq_max[i], now.v);
  }
  const float m_inverse = kEncode ? inverse_of(state.exp_avg_max[i - 1]) : 0;
  const float v_inverse = kEncode ? inverse_of(state.exp_avg_sq_max[i - 1]) : 0;
  auto m_largest = hn::Zero(d);
  auto v_largest = hn::Zero(d);
  for (int64_t part = 0; part < kQuantizationBlock; part += kPart) {
    if constexpr (kUpdate) {
      update_part(factors, tensors.weights.from(begin + part), now.m + part, now.v + part, m_largest, v_largest);
    }
    if constexpr (kEncode) {
      const int64_t to = begin - kQuantizationBlock + part;
      encode_part<true>(before.m + part, m_inverse, state.exp_avg + to);
      encode_part<false>(before.v + part, v_inverse, state.exp_avg_sq + to);
    }
  }
  if constexpr (kUpdate) {
    state.exp_avg_max[i] = hn::GetLane(hn::MaxOfLanes(d, m_largest));
    state.exp_avg_sq_max[i] = hn::GetLane(hn::MaxOfLanes(d, v_largest));
  }
}

/// Takes copies: the compiler knows that no store changes a copy.
template <class Weights>
void update_blocks(Factors factors, Tensors<Weights> tensors, int64_t count) {
  Moments moments[2];
  advance<true, false>(factors, tensors, 0, moments[0], moments[1]);
  for (int64_t i = 1; i < count; ++i) {
    advance<true, true>(factors, tensors, i, moments[i % 2], moments[1 - i % 2]);
  }
  advance<false, true>(factors, tensors, count, moments[count % 2], moments[1 - count % 2]);
}

/// The rest, in a block filled up with zeros.
template <class Weights>
void update_rest(const Factors& factors, const Tensors<Weights>& tensors, int64_t count) {
  typename Weights::Rest weights(tensors.weights, count);
  const EightBitMoments& state = tensors.moments;
  uint8_t m[kQuantizationBlock];
  uint8_t v[kQuantizationBlock] = {};
  std::fill_n(m, kQuantizationBlock, uint8_t{127});
  std::copy_n(state.exp_avg, count, m);
  std::copy_n(state.exp_avg_sq, count, v);
  update_blocks(factors, Tensors<Weights>{weights.weights(), {m, v, state.exp_avg_max, state.exp_avg_sq_max}}, 1);
  weights.back(tensors.weights, count);
  std::copy_n(m, count, state.exp_avg);
  std::copy_n(v, count, state.exp_avg_sq);
}

template <class Weights>
void update_all(const AdamWStep& step, const Weights& weights, const EightBitMoments& state, int64_t count) {
  const Factors factors(step);
  const int64_t done = count / kQuantizationBlock * kQuantizationBlock;
  if (done > 0) {
    update_blocks(factors, Tensors<Weights>{weights, state}, done / kQuantizationBlock);
  }
  if (count > done) {
    update_rest(factors, Tensors<Weights>{weights.from(done), state.from(done)}, count - done);
  }
}

void update(const AdamWStep& step, float* parameter, const float* gradient, const EightBitMoments& state,
            int64_t count) {
  update_all(step, FullWeights{parameter, gradient}, state, count);
}
void update_split(const AdamWStep& step, BFloat16* parameter, int8_t* correction, const BFloat16* gradient,
                  const EightBitMoments& state, int64_t count) {
  update_all(step, SplitWeights{parameter, correction, gradient}, state, count);
}

}  // namespace
}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace snug::kernels {

HWY_EXPORT(update);
HWY_EXPORT(update_split);

void adamw8bit_update(const AdamWStep& step, float* parameter, const float* gradient, const EightBitMoments& state,
                      int64_t count) {
  HWY_DYNAMIC_DISPATCH(update)(step, parameter, gradient, state, count);
}
void adamw8bit_update(const AdamWStep& step, BFloat16* parameter, int8_t* correction, const BFloat16* gradient,
                      const EightBitMoments& state, int64_t count) {
  HWY_DYNAMIC_DISPATCH(update_split)(step, parameter, correction, gradient, state, count);
}

}  // namespace snug::kernels
#endif
