// Weights of 24 bits in two tensors, after FlashOptim's weight splitting (arXiv:2602.23349), in integer arithmetic: no
// bit of the 24 is lost. They are the upper 24 bits of an FP32 number, rounded to nearest: 15 bits of a fraction, so
// that rounding moves a weight by 2^-16 of itself at most. `rounded` is the nearest BF16 number, which the model
// computes with; halves are rounded away from zero. `correction` says how far the weight is from it, in 256ths of the
// distance to the next BF16 number, at most half of that distance. A correction of zero belongs to a weight that is a
// BF16 number. Any two of them make a number: where the BF16 part was replaced by another one, the correction moves it
// by half a unit at most, and never beyond zero. Included once per instruction set: see adamw_simd.h.
#if defined(SNUG_KERNELS_DETAIL_SPLIT_WEIGHTS_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef SNUG_KERNELS_DETAIL_SPLIT_WEIGHTS_SIMD_H
#undef SNUG_KERNELS_DETAIL_SPLIT_WEIGHTS_SIMD_H
#else
#define SNUG_KERNELS_DETAIL_SPLIT_WEIGHTS_SIMD_H
#endif

#include <cstdint>

#include <hwy/highway.h>

#include "src/kernels/half_simd.h"
#include "src/kernels/master_adamw.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::Vec<D> load_split(D d, const BFloat16* rounded, const int8_t* correction) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<int8_t, D> d8;
  const auto bits = hn::BitCast(di, load(d, rounded));
  const auto sign = hn::And(bits, hn::Set(di, INT32_MIN));
  const auto distance = hn::ShiftLeft<8>(hn::PromoteTo(di, hn::LoadU(d8, correction)));
  const auto magnitude = hn::Max(hn::Add(hn::Xor(bits, sign), distance), hn::Zero(di));
  return hn::BitCast(d, hn::Or(magnitude, sign));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE void store_split(D d, V weight, BFloat16* rounded, int8_t* correction) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint8_t, D> d8;
  // Rounding could turn a NaN into another number.
  const auto bits =
      hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(weight)), hn::Set(du, 0x7FC00000), hn::BitCast(du, weight));
  const auto rounded24 = hn::Add(bits, hn::Set(du, 0x80));
  store_bits(d, hn::ShiftRight<16>(hn::Add(rounded24, hn::Set(du, 0x8000))), &rounded->bits);
  // The third byte, read as a number with a sign, is the distance from the two above it after their rounding.
  hn::StoreU(hn::TruncateTo(d8, hn::ShiftRight<8>(rounded24)), d8, reinterpret_cast<uint8_t*>(correction));
}

}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
