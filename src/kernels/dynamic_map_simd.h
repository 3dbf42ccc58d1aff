// Blocks of values to places in the dynamic map and back. Included once per instruction set: see adamw_simd.h.
#if defined(SNUG_KERNELS_DETAIL_DYNAMIC_MAP_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SNUG_KERNELS_DETAIL_DYNAMIC_MAP_SIMD_H
#undef SNUG_KERNELS_DETAIL_DYNAMIC_MAP_SIMD_H
#else
#define SNUG_KERNELS_DETAIL_DYNAMIC_MAP_SIMD_H
#endif

#include <array>
#include <cstdint>

#include <hwy/highway.h>

#include "src/kernels/dynamic_map.h"
#include "src/kernels/quantized_adamw.h"
#include "src/kernels/quantized_step_simd.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The number of bytes that are decoded or encoded at once: those of the longest vector of most processors.
constexpr int64_t kPart = 64;

#if !HWY_CAP_GE512

/// table[index] for indices up to 8, where the table begins anew.
template <class D, class VI = hn::Vec<hn::RebindToSigned<D>>>
HWY_INLINE hn::Vec<D> look_up(D d, const std::array<float, 9>& table, VI index) {
#if HWY_CAP_GE256 && !HWY_HAVE_SCALABLE
  const hn::RebindToSigned<D> di;
  return hn::TableLookupLanes(hn::Load(d, table.data()), hn::IndicesFromVec(d, hn::And(index, hn::Set(di, 7))));
#else
  return hn::GatherIndex(d, table.data(), index);
#endif
}

/// The value of cell q. Zero's cell is the one before the first: 1/2 with a sign, 1 without.
template <bool kSigned, class D, class V = hn::Vec<D>>
HWY_INLINE V value_of_cell(D d, V q) {
  const hn::RebindToSigned<D> di;
  const auto& map = detail::kDynamicMap<kSigned>;
  const auto exponent = hn::Sub(hn::ShiftRight<23>(hn::BitCast(di, q)), hn::Set(di, kSigned ? 126 : 127));
  return hn::Add(hn::Mul(q, look_up(d, map.step, exponent)), look_up(d, map.start, exponent));
}

/// The position of x, from 0 to 1, among the cells: the least of some lines.
template <bool kSigned, class D, class V = hn::Vec<D>>
HWY_INLINE V position_of(D d, V x) {
  const auto& map = detail::kDynamicMap<kSigned>;
  V position = hn::MulAdd(x, hn::Set(d, map.slope[0]), hn::Set(d, map.offset[0]));
#pragma GCC unroll 8
  for (size_t i = 1; i < map.slope.size(); ++i) {
    position = lesser(d, position, hn::MulAdd(x, hn::Set(d, map.slope[i]), hn::Set(d, map.offset[i])));
  }
  return position;
}

/// For x from -1 to 1 and its magnitude: a number whose whole part is the cell with the nearest value.
template <bool kSigned, class D, class V = hn::Vec<D>>
HWY_INLINE V nearest_cell(D d, V x, V magnitude) {
  const auto& map = detail::kDynamicMap<kSigned>;
  V position = position_of<kSigned>(d, magnitude);
  // The first fifth of a decade's first cell belongs to the value below, whose cell is five times narrower. So after
  // the power of two P, take the lesser of position and P + 2 (position - P - 0.2).
  const hn::RebindToUnsigned<D> du;
  const V power = hn::BitCast(d, hn::And(hn::BitCast(du, position), hn::Set(du, 0x7F800000)));
  position = lesser(d, position, hn::Sub(hn::MulAdd(position, hn::Set(d, 2.0f), hn::Set(d, -0.4f)), power));
  // The last value, 1, has no negative.
  return greater(d, position, hn::MulAdd(x, hn::Set(d, map.last_slope), hn::Set(d, map.last_offset)));
}

/// Bytes to numbers from -1 to 1, or 0 to 1.
template <bool kSigned, class D>
HWY_INLINE hn::Vec<D> decode(D d, const uint8_t* codes) {
  const hn::Rebind<uint8_t, D> d8;
  const hn::RebindToSigned<D> di;
  const auto code = hn::PromoteTo(di, hn::LoadU(d8, codes));
  if constexpr (kSigned) {
    const auto cell = hn::ConvertTo(d, hn::Sub(code, hn::Set(di, 127)));
    const auto value = value_of_cell<true>(d, greater(d, hn::Abs(cell), hn::Set(d, 0.5f)));
    return hn::CopySignToAbs(value, cell);
  } else {
    return value_of_cell<false>(d, hn::ConvertTo(d, hn::Add(code, hn::Set(di, 1))));
  }
}

/// The nearest code of x * inverse.
template <bool kSigned, class D, class V = hn::Vec<D>>
HWY_INLINE void encode(D d, V x, V inverse, uint8_t* codes) {
  const V ratio = hn::Mul(x, inverse);
  // From 2^23 to 2^24 the low bits of a float are a whole number, rounded to nearest: hence the halves.
  V code;
  if constexpr (kSigned) {
    const V cell = hn::Sub(nearest_cell<true>(d, ratio, hn::Abs(ratio)), hn::Set(d, 0.5f));
    code = hn::Add(hn::CopySignToAbs(cell, ratio), hn::Set(d, 1.5f * 8388608.0f + 127));
  } else {
    code = hn::Add(nearest_cell<false>(d, ratio, ratio), hn::Set(d, 8388608.0f - 1.5f));
  }
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint8_t, D> d8;
  hn::StoreU(hn::TruncateTo(d8, hn::BitCast(du, code)), d8, codes);
}

template <bool kSigned>
HWY_INLINE void decode_part(const uint8_t* codes, float scale, float* values) {
  const hn::ScalableTag<float> d;
  for (int64_t i = 0; i < kPart; i += static_cast<int64_t>(hn::Lanes(d))) {
    hn::Store(hn::Mul(decode<kSigned>(d, codes + i), hn::Set(d, scale)), d, values + i);
  }
}

template <bool kSigned>
HWY_INLINE void encode_part(const float* values, float inverse, uint8_t* codes) {
  const hn::ScalableTag<float> d;
  for (int64_t i = 0; i < kPart; i += static_cast<int64_t>(hn::Lanes(d))) {
    encode<kSigned>(d, hn::Load(d, values + i), hn::Set(d, inverse), codes + i);
  }
}

#else  // vectors of 16, each a whole table: half the operations

using WideFloats = hn::Vec<hn::ScalableTag<float>>;
using WideInts = hn::Vec<hn::ScalableTag<int32_t>>;

/// table[the last four bits of an index].
HWY_INLINE WideFloats look_up(WideFloats table, WideInts index) {
  return {_mm512_permutexvar_ps(index.raw, table.raw)};
}

/// Bytes that lie four by four as the interleaving of vectors wants them, or back: the rows of a matrix become its
/// columns.
HWY_INLINE hn::Vec<hn::ScalableTag<uint8_t>> transposed(hn::Vec<hn::ScalableTag<uint8_t>> bytes) {
  const hn::ScalableTag<int32_t> di;
  alignas(64) static constexpr int32_t kOrder[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return {_mm512_permutexvar_epi32(hn::Load(di, kOrder).raw, bytes.raw)};
}

template <bool kSigned>
HWY_INLINE void decode_part(const uint8_t* codes, float scale, float* values) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<int32_t> di;
  const hn::ScalableTag<uint8_t> d8;
  const hn::ScalableTag<uint16_t> d16;
  const auto& map = detail::kDynamicSegments<kSigned>;
  const auto step = hn::Mul(hn::Load(d, map.step.data()), hn::Set(d, scale));
  const auto start = hn::Mul(hn::Load(d, map.start.data()), hn::Set(d, scale));
  // A float whose last byte is a code and whose upper half is this is 2^23 + code, or with a sign 2^25 + 4 code.
  const auto upper = hn::Set(d16, kSigned ? 0x4C00 : 0x4B00);
  const auto zero_code = hn::Set(d, kSigned ? 0x1p25f + 4 * 127 : 0x1p23f - 1);
  const auto decode = [&](auto bits, float* to) HWY_ATTR {
    const auto cell = hn::Sub(hn::BitCast(d, bits), zero_code);
    const auto cell_bits = hn::BitCast(di, cell);
    const auto exponent = hn::ShiftRight<23>(cell_bits);
    auto from = look_up(start, exponent);
    if constexpr (kSigned) {  // takes the cell's sign
      constexpr int kFromXorSign = 0x78;
      const auto sign = hn::Set(di, INT32_MIN);
      from = hn::BitCast(
          d, WideInts{_mm512_ternarylogic_epi32(hn::BitCast(di, from).raw, cell_bits.raw, sign.raw, kFromXorSign)});
    }
    hn::Store(hn::MulAdd(cell, look_up(step, exponent), from), d, to);
  };
  const auto bytes = transposed(hn::LoadU(d8, codes));
  const auto lower_words = hn::BitCast(d16, hn::InterleaveLower(d8, bytes, hn::Zero(d8)));
  const auto upper_words = hn::BitCast(d16, hn::InterleaveUpper(d8, bytes, hn::Zero(d8)));
  decode(hn::InterleaveLower(d16, lower_words, upper), values);
  decode(hn::InterleaveUpper(d16, lower_words, upper), values + 16);
  decode(hn::InterleaveLower(d16, upper_words, upper), values + 32);
  decode(hn::InterleaveUpper(d16, upper_words, upper), values + 48);
}

template <bool kSigned>
HWY_INLINE void encode_part(const float* values, float inverse, uint8_t* codes) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<int32_t> di;
  const hn::ScalableTag<uint32_t> du;
  const hn::ScalableTag<int16_t> d16;
  const hn::ScalableTag<uint8_t> d8;
  const auto& map = detail::kDynamicSegments<kSigned>;
  const auto slope = hn::Load(d, map.slope.data());
  const auto offset = hn::Load(d, map.offset.data());
  const auto last = hn::Load(d, map.last.data());
  const auto below_next = hn::Load(d, map.below_next.data());
  const auto encode = [&](const float* from) HWY_ATTR {
    const auto ratio = hn::Mul(hn::Load(d, from), hn::Set(d, inverse));
    const auto x = kSigned ? hn::Abs(ratio) : ratio;
    const auto x_bits = hn::BitCast(di, x);
    const auto bucket = hn::Max(hn::ShiftRight<24>(x_bits), hn::Set(di, detail::kFirstBucket));
    // One more where x is the greater.
    const auto below = hn::BitCast(di, look_up(below_next, bucket));
    const auto is_above = hn::ShiftRight<31>(hn::BitCast(du, hn::Sub(below, x_bits)));
    const auto segment = hn::Add(below, hn::BitCast(di, is_above));
    auto code = hn::MulAdd(x, look_up(slope, segment), look_up(offset, segment));
    code = lesser(d, code, look_up(last, segment));
    // Highway's own rounding also mends what is too large for an integer.
    return WideInts{_mm512_cvtps_epi32((kSigned ? hn::CopySignToAbs(code, ratio) : code).raw)};
  };
  auto low = hn::ReorderDemote2To(d16, encode(values), encode(values + 16));
  auto high = hn::ReorderDemote2To(d16, encode(values + 32), encode(values + 48));
  if constexpr (kSigned) {
    low = hn::Add(low, hn::Set(d16, 127));
    high = hn::Add(high, hn::Set(d16, 127));
  }
  // Saturates: 1 has no negative, so that -1 gets the code of the value next to it.
  const hn::Vec<hn::ScalableTag<uint8_t>> bytes{_mm512_packus_epi16(low.raw, high.raw)};
  hn::StoreU(transposed(bytes), d8, codes);
}

#endif

/// Decodes a block into values times `scale`; the values are aligned.
template <bool kSigned>
HWY_INLINE void decode_block(const uint8_t* codes, float scale, float* values) {
  for (int64_t i = 0; i < kQuantizationBlock; i += kPart) {
    decode_part<kSigned>(codes + i, scale, values + i);
  }
}

}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
