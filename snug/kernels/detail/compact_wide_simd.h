// 64 elements between memory and four vectors of 16, for compact_adamw.cpp with AVX-512: with half the operations that
// one vector after the other takes. Included once per instruction set: see adamw_simd.h.
#if defined(SNUG_KERNELS_DETAIL_COMPACT_WIDE_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SNUG_KERNELS_DETAIL_COMPACT_WIDE_SIMD_H
#undef SNUG_KERNELS_DETAIL_COMPACT_WIDE_SIMD_H
#else
#define SNUG_KERNELS_DETAIL_COMPACT_WIDE_SIMD_H
#endif

#include <cstdint>

#include <hwy/highway.h>

#include "snug/kernels/detail/split_weights.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_CAP_GE512

using WideFloat = hn::Vec<hn::ScalableTag<float>>;

/// Elements are in groups of four, which interleaving keeps together: vector 0 has groups 0, 2, 4, 6, vector 1 has 1,
/// 3, 5, 7, vector 2 has 8, 10, 12, 14, and vector 3 the rest. So pairs of vectors hold 32 numbers of 16 bits in the
/// order of memory.
struct Four {
  WideFloat at[4];
};

/// 64 bytes whose groups lie as the interleaving of vectors wants them.
HWY_INLINE __m512i load_groups(const void* bytes) {
  const __m512i order = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  return _mm512_permutexvar_epi32(order, _mm512_loadu_si512(bytes));
}

HWY_INLINE void store_groups(__m512i bytes, void* to) {
  const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
}

/// Pairs of 16 bits to numbers of 32: 0 and 1 from the first, 2 and 3 from the second.
HWY_INLINE Four join_halves(__m512i low0, __m512i high0, __m512i low1, __m512i high1) {
  const auto joined = [](__m512i bits) HWY_ATTR { return WideFloat{_mm512_castsi512_ps(bits)}; };
  return {{joined(_mm512_unpacklo_epi16(low0, high0)), joined(_mm512_unpackhi_epi16(low0, high0)),
           joined(_mm512_unpacklo_epi16(low1, high1)), joined(_mm512_unpackhi_epi16(low1, high1))}};
}

HWY_INLINE Four load_four(const BFloat16* from) {
  const __m512i zero = _mm512_setzero_si512();
  return join_halves(zero, _mm512_loadu_si512(from), zero, _mm512_loadu_si512(from + 32));
}

/// Codes times 2^24.
HWY_INLINE Four load_codes(const int8_t* codes) {
  const __m512i zero = _mm512_setzero_si512(), bytes = load_groups(codes);
  Four all = join_halves(zero, _mm512_unpacklo_epi8(zero, bytes), zero, _mm512_unpackhi_epi8(zero, bytes));
  for (WideFloat& one : all.at) {
    one.raw = _mm512_cvtepi32_ps(_mm512_castps_si512(one.raw));
  }
  return all;
}

HWY_INLINE Four load_codes(const uint8_t* codes) {
  const __m512i zero = _mm512_setzero_si512(), bytes = load_groups(codes);
  Four all = join_halves(_mm512_unpacklo_epi8(bytes, zero), zero, _mm512_unpackhi_epi8(bytes, zero), zero);
  for (WideFloat& one : all.at) {
    one.raw = _mm512_cvtepi32_ps(_mm512_castps_si512(one.raw));
  }
  return all;
}

/// Rounded to nearest; they must be in the range of the type.
HWY_INLINE void store_codes(const Four& codes, int8_t* to) {
  const auto rounded = [&](int i) HWY_ATTR { return _mm512_cvtps_epi32(codes.at[i].raw); };
  store_groups(
      _mm512_packs_epi16(_mm512_packs_epi32(rounded(0), rounded(1)), _mm512_packs_epi32(rounded(2), rounded(3))), to);
}

/// Where `positive` is above zero, at least 1.
HWY_INLINE void store_codes(const Four& codes, const Four& positive, uint8_t* to) {
  const auto rounded = [&](int i) HWY_ATTR {
    const __m512i one = _mm512_min_epi32(_mm512_castps_si512(positive.at[i].raw), _mm512_set1_epi32(1));
    return _mm512_max_epi32(_mm512_cvtps_epi32(codes.at[i].raw), one);
  };
  store_groups(
      _mm512_packus_epi16(_mm512_packs_epi32(rounded(0), rounded(1)), _mm512_packs_epi32(rounded(2), rounded(3))), to);
}

/// As load_split.
HWY_INLINE Four load_split_four(const BFloat16* rounded, const int8_t* correction) {
  const __m512i zero = _mm512_setzero_si512(), sign = _mm512_set1_epi16(INT16_MIN), bytes = load_groups(correction);
  __m512i low[2] = {_mm512_unpacklo_epi8(zero, bytes), _mm512_unpackhi_epi8(zero, bytes)};
  __m512i high[2];
  for (int i = 0; i < 2; ++i) {
    const __m512i bits = _mm512_loadu_si512(rounded + 32 * i);
    const __m512i magnitude = _mm512_andnot_si512(sign, bits);
    const __m512i borrow = _mm512_srli_epi16(low[i], 15);  // of a negative correction
    constexpr int kSelect = 0xCA;
    high[i] = _mm512_ternarylogic_epi32(sign, bits, _mm512_subs_epu16(magnitude, borrow), kSelect);
    low[i] = _mm512_maskz_mov_epi16(_mm512_cmpge_epu16_mask(magnitude, borrow), low[i]);
  }
  return join_halves(low[0], high[0], low[1], high[1]);
}

/// As store_split, for weights that are no NaN with a payload below BF16's: arithmetic makes none of load_split's.
HWY_INLINE void store_split_four(const Four& weights, BFloat16* rounded, int8_t* correction) {
  __m512i third[2];
  for (int i = 0; i < 2; ++i) {
    const auto rounded24 = [&](int j) HWY_ATTR {
      return _mm512_add_epi32(_mm512_castps_si512(weights.at[2 * i + j].raw), _mm512_set1_epi32(0x80));
    };
    const __m512i a = rounded24(0), b = rounded24(1);
    const __m512i low = _mm512_packus_epi32(_mm512_and_si512(a, _mm512_set1_epi32(0xFFFF)),
                                            _mm512_and_si512(b, _mm512_set1_epi32(0xFFFF)));
    const __m512i high = _mm512_packus_epi32(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16));
    _mm512_storeu_si512(rounded + 32 * i, _mm512_add_epi16(high, _mm512_srli_epi16(low, 15)));
    third[i] = _mm512_srli_epi16(low, 8);
  }
  store_groups(_mm512_packus_epi16(third[0], third[1]), correction);
}

#endif

}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
