// Conversions between vectors of FP32 and memory in 16 bits, in integer arithmetic, so that they are the same on every
// processor. Included once per instruction set: see adamw_simd.h.
#if defined(SNUG_KERNELS_DETAIL_HALF_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SNUG_KERNELS_DETAIL_HALF_SIMD_H
#undef SNUG_KERNELS_DETAIL_HALF_SIMD_H
#else
#define SNUG_KERNELS_DETAIL_HALF_SIMD_H
#endif

#include <algorithm>
#include <cstdint>

#include "src/kernels/lanes.h"
#include "src/kernels/master_adamw.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
using Bits = hn::Vec<hn::RebindToUnsigned<D>>;

/// Elements that do not fill a vector of FP32, moved to where they do.
template <class T>
struct Rest {
  Rest() = default;
  Rest(const T* from, int64_t count) { std::copy_n(from, count, values); }
  void back(T* to, int64_t count) const { std::copy_n(values, count, to); }
  T values[HWY_MAX_BYTES / sizeof(float)] = {};
};

/// Elements of a vector of FP32.
HWY_INLINE int64_t lanes() { return static_cast<int64_t>(hn::Lanes(hn::ScalableTag<float>())); }

/// 16 bits per element to the low half of 32.
template <class D>
HWY_INLINE Bits<D> load_bits(D, const uint16_t* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> du;
  return hn::PromoteTo(du, hn::LoadU(d16, from));
}

template <class D>
HWY_INLINE void store_bits(D, Bits<D> bits, uint16_t* to) {
  const hn::Rebind<uint16_t, D> d16;
  hn::StoreU(hn::TruncateTo(d16, bits), d16, to);
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const BFloat16* from) {
  return hn::BitCast(d, hn::ShiftLeft<16>(load_bits(d, &from->bits)));
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Float16* from) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = load_bits(d, &from->bits);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFF));
  const auto sign = hn::ShiftLeft<16>(hn::Sub(bits, magnitude));
  // The exponent is biased by 15 instead of 127. Infinity and NaN have the greatest one; below the least, the bits
  // count 2^-24.
  const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), hn::Set(du, 112u << 23));
  const auto special = hn::Gt(magnitude, hn::Set(du, 0x7BFF));
  const auto finite_or_not = hn::IfThenElse(special, hn::Add(normal, hn::Set(du, 112u << 23)), normal);
  const auto tiny = hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 0x1p-24f));
  const auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x400)), hn::BitCast(du, tiny), finite_or_not);
  return hn::BitCast(d, hn::Or(value, sign));
}

/// The upper half of `bits` + `addend`. A NaN keeps its upper half, and gets the bit that tells it from infinity.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void store_sum(D d, V value, Bits<D> addend, BFloat16* to) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, value);
  const auto sum = hn::Add(bits, addend);
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000));
  store_bits(d, hn::ShiftRight<16>(hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), quiet, sum)), &to->bits);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE void store(D d, V value, float* to) {
  hn::StoreU(value, d, to);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE void store(D d, V value, BFloat16* to) {
  const hn::RebindToUnsigned<D> du;
  // Half a unit, or a little less where the number below is even.
  const auto odd = hn::And(hn::ShiftRight<16>(hn::BitCast(du, value)), hn::Set(du, 1));
  store_sum(d, value, hn::Add(odd, hn::Set(du, 0x7FFF)), to);
}

/// Up with the probability that the dropped half of the bits is of a whole unit.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void store_stochastic(D d, V value, Bits<D> random, BFloat16* to) {
  store_sum(d, value, hn::ShiftRight<16>(random), to);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE void store(D d, V value, Float16* to) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, value);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFF));
  const auto sign = hn::ShiftRight<16>(hn::Sub(bits, magnitude));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(du, 0xFFF)), odd);
  const auto normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(du, 112u << 23)));
  // Below 2^-14 halves are multiples of 2^-24, which is the last bit of floats from 1/2 on: an addition rounds.
  const auto half = hn::Set(d, 0.5f);
  const auto tiny = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du, half));
  // From 65520 on, halfway to the next power of two, infinity.
  const auto infinity = hn::Set(du, 0x7C00);
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 113u << 23)), tiny, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x477FEFFF)), infinity, result);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7F800000)), hn::Set(du, 0x7E00), result);
  store_bits(d, hn::Or(result, sign), &to->bits);
}

}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
