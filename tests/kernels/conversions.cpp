#include "tests/kernels/conversions.h"

#include <algorithm>

#include "src/kernels/quantized_adamw.h"

// Compiles what follows once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/kernels/conversions.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "src/kernels/dynamic_map_simd.h"
#include "src/kernels/half_simd.h"
#include "src/kernels/quantized_step_simd.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<D>;

template <class From, class To>
HWY_INLINE void convert(const From* from, To* to, int64_t count) {
  const D d;
  for (; count >= lanes(); count -= lanes(), from += lanes(), to += lanes()) {
    store(d, load(d, from), to);
  }
  const Rest in(from, count);
  Rest<To> out;
  store(d, load(d, in.values), out.values);
  out.back(to, count);
}

void round_half(const float* values, Float16* rounded, int64_t count) { convert(values, rounded, count); }
void round_bfloat(const float* values, BFloat16* rounded, int64_t count) { convert(values, rounded, count); }
void widen_half(const Float16* values, float* widened, int64_t count) { convert(values, widened, count); }
void widen_bfloat(const BFloat16* values, float* widened, int64_t count) { convert(values, widened, count); }

void round_with(const float* values, const uint32_t* bits, BFloat16* rounded, int64_t count) {
  const D d;
  const DU du;
  for (; count >= lanes(); count -= lanes(), values += lanes(), bits += lanes(), rounded += lanes()) {
    store_stochastic(d, hn::LoadU(d, values), hn::LoadU(du, bits), rounded);
  }
  const Rest in(values, count);
  const Rest random(bits, count);
  Rest<BFloat16> out;
  store_stochastic(d, hn::LoadU(d, in.values), hn::LoadU(du, random.values), out.values);
  out.back(rounded, count);
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
    for (int64_t i = 0; i < kQuantizationBlock; i += kPart) {
      encode_part<kSigned>(block + i, inverse_of(largest), block_codes + i);
    }
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

HWY_EXPORT(round_half);
HWY_EXPORT(round_bfloat);
HWY_EXPORT(widen_half);
HWY_EXPORT(widen_bfloat);
HWY_EXPORT(round_with);
HWY_EXPORT(quantize_signed);
HWY_EXPORT(quantize_unsigned);
HWY_EXPORT(dequantize_signed);
HWY_EXPORT(dequantize_unsigned);

void round_to_nearest(const float* values, Float16* rounded, int64_t count) {
  HWY_DYNAMIC_DISPATCH(round_half)(values, rounded, count);
}
void round_to_nearest(const float* values, BFloat16* rounded, int64_t count) {
  HWY_DYNAMIC_DISPATCH(round_bfloat)(values, rounded, count);
}
void widen(const Float16* values, float* widened, int64_t count) {
  HWY_DYNAMIC_DISPATCH(widen_half)(values, widened, count);
}
void widen(const BFloat16* values, float* widened, int64_t count) {
  HWY_DYNAMIC_DISPATCH(widen_bfloat)(values, widened, count);
}

void round_stochastically(const float* values, const uint32_t* bits, BFloat16* rounded, int64_t count) {
  HWY_DYNAMIC_DISPATCH(round_with)(values, bits, rounded, count);
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
