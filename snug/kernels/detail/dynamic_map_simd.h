// Vectors of values to places in the dynamic map and back. Included once per instruction set: see adamw_simd.h.
#if defined(SNUG_KERNELS_DETAIL_DYNAMIC_MAP_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SNUG_KERNELS_DETAIL_DYNAMIC_MAP_SIMD_H
#undef SNUG_KERNELS_DETAIL_DYNAMIC_MAP_SIMD_H
#else
#define SNUG_KERNELS_DETAIL_DYNAMIC_MAP_SIMD_H
#endif

#include <array>
#include <cstdint>

#include <hwy/highway.h>

#include "snug/kernels/detail/dynamic_map.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// table[index] for indices up to 8, where the table begins anew.
template <class D, class VI = hn::Vec<hn::RebindToSigned<D>>>
HWY_INLINE hn::Vec<D> look_up(D d, const std::array<float, 16>& table, VI index) {
#if HWY_CAP_GE512
  return hn::TableLookupLanes(hn::Load(d, table.data()), hn::IndicesFromVec(d, index));
#elif HWY_CAP_GE256 && !HWY_HAVE_SCALABLE
  const hn::RebindToSigned<D> di;
  return hn::TableLookupLanes(hn::Load(d, table.data()), hn::IndicesFromVec(d, hn::And(index, hn::Set(di, 7))));
#else
  return hn::GatherIndex(d, table.data(), index);
#endif
}

/// The lesser and the greater of numbers of which one at most is negative, compared as integers: some processors, such as Zen 5, have more
/// units for that, and the units for floating point are what limits these kernels.
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
#if HWY_CAP_GE512
  // Four times as fast as the division into decades is the one into pairs of exponents, in each of which two lines are enough.
  const hn::RebindToSigned<D> di;
  const hn::Repartition<uint16_t, D> d16;
  const auto from_first =
      hn::SaturatedSub(hn::BitCast(d16, x), hn::BitCast(d16, hn::Set(di, detail::kFirstBucket << 24)));
  const auto bucket = hn::ShiftRight<24>(hn::BitCast(di, from_first));
  return lesser(d, hn::MulAdd(x, look_up(d, map.left_slope, bucket), look_up(d, map.left_offset, bucket)),
                hn::MulAdd(x, look_up(d, map.right_slope, bucket), look_up(d, map.right_offset, bucket)));
#else
  V position = hn::MulAdd(x, hn::Set(d, map.slope[0]), hn::Set(d, map.offset[0]));
#pragma GCC unroll 8
  for (size_t i = 1; i < map.slope.size(); ++i) {
    position = lesser(d, position, hn::MulAdd(x, hn::Set(d, map.slope[i]), hn::Set(d, map.offset[i])));
  }
  return position;
#endif
}

/// For x from -1 to 1 and its magnitude: a number whose whole part is the cell with the nearest value.
template <bool kSigned, class D, class V = hn::Vec<D>>
HWY_INLINE V nearest_cell(D d, V x, V magnitude) {
  const auto& map = detail::kDynamicMap<kSigned>;
  V position = position_of<kSigned>(d, magnitude);
  // The first fifth of a decade's first cell belongs to the value below, whose cell is five times narrower. So after the power of two P it
  // takes the lesser of position and P + 2 (position - P - 0.2).
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

/// The nearest code of x * inverse. Without a sign, what is above 0 gets a code above 0: see quantized_adamw.h.
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

}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
