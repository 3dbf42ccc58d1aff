#pragma once
// The arithmetic of bias_gelu's CUDA kernel. nvcc compiles this header for the GPU; every other compiler compiles it
// for the host, where FP16 is emulated to the bit. So each formula is tested on all 65,536 FP16 inputs without a GPU.
//
//   gelu(z) = z / 2 (1 + tanh(u)),  u = sqrt(2 / pi) (z + 0.044715 z^3),  z = x + bias
//   (Hendrycks & Gimpel 2016, arXiv:1606.08415)
//
// Since (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), the tanh can be avoided, and with it the loss of digits in 1 + tanh(u)
// near tanh = -1. tests/kernels/gelu_math_test.cpp states each variant's largest error, and where it occurs.

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define SNUG_DEVICE __device__ __forceinline__
#else
#define SNUG_DEVICE inline
#endif

namespace snug::kernels::detail {

#if defined(__CUDACC__)

using Half = __half;
using Half2 = __half2;

SNUG_DEVICE Half lower(Half2 a) { return __low2half(a); }
SNUG_DEVICE Half upper(Half2 a) { return __high2half(a); }
SNUG_DEVICE Half2 pack(Half a, Half b) { return __halves2half2(a, b); }
SNUG_DEVICE float to_float(Half a) { return __half2float(a); }
SNUG_DEVICE Half to_half(float a) { return __float2half_rn(a); }
// The _rn forms are never contracted into a fused multiply-add, so that the host's emulation gives the same bits.
SNUG_DEVICE Half2 multiply(Half2 a, Half2 b) { return __hmul2_rn(a, b); }
SNUG_DEVICE Half2 add(Half2 a, Half2 b) { return __hadd2_rn(a, b); }
SNUG_DEVICE float float_tanh(float a) { return tanhf(a); }
SNUG_DEVICE Half2 half_tanh(Half2 a) { return h2tanh(a); }

#else

struct Half {
  uint16_t bits = 0;
};
struct Half2 {
  Half low, high;
};

inline Half lower(Half2 a) { return a.low; }
inline Half upper(Half2 a) { return a.high; }
inline Half2 pack(Half a, Half b) { return {a, b}; }

inline float to_float(Half a) {
  const int exponent = (a.bits >> 10) & 31;
  const auto fraction = static_cast<float>(a.bits & 1023);
  const float special = fraction == 0 ? INFINITY : NAN;
  const float finite = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
  return std::copysign(exponent == 31 ? special : finite, a.bits >> 15 == 0 ? 1.0F : -1.0F);
}

/// To the nearest, to the even one of two.
inline Half to_half(float a) {
  const int sign = std::signbit(a) ? 0x8000 : 0;
  const float magnitude = std::fabs(a);
  if (std::isnan(a)) {
    return {0x7fff};
  }
  if (magnitude >= 65536) {
    return {static_cast<uint16_t>(sign | 0x7c00)};
  }
  const int exponent = magnitude < 0x1p-14F ? -14 : std::ilogb(magnitude);
  // In units of the last place, 1024 to 2048 where not subnormal. The leading one, and a carry, then add one to the
  // exponent's field.
  const float units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  return {static_cast<uint16_t>(sign | (((exponent + 14) << 10) + static_cast<int>(units)))};
}

// Rounded once in effect: products of two FP16 values are exact in FP32, and for sums FP32's 24 bits are the 2 * 11 + 2
// that make a second rounding harmless (Figueroa 1995).
inline Half2 multiply(Half2 a, Half2 b) {
  return {to_half(to_float(a.low) * to_float(b.low)), to_half(to_float(a.high) * to_float(b.high))};
}
inline Half2 add(Half2 a, Half2 b) {
  return {to_half(to_float(a.low) + to_float(b.low)), to_half(to_float(a.high) + to_float(b.high))};
}
// Rounded correctly, so that results do not depend on the C library. CUDA's tanhf may be off by the last bit or two.
inline float float_tanh(float a) { return static_cast<float>(std::tanh(static_cast<double>(a))); }
// CUDA's own h2tanh, too, goes there and back through FP32.
inline Half2 half_tanh(Half2 a) {
  return {to_half(float_tanh(to_float(a.low))), to_half(float_tanh(to_float(a.high)))};
}

#endif

constexpr float kGeluScale = 0.7978845608F;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715F;

SNUG_DEVICE float tanh_argument(float z, float cube) { return kGeluScale * (z + kGeluCubic * cube); }

/// The terms that gelu and its derivative share: e = exp(-|2 u|), which cannot overflow, 1 / (1 + e), and the factor of
/// z.
struct GeluTerms {
  float e, inverse, factor;
};

SNUG_DEVICE GeluTerms gelu_terms(float z) {
  const float argument = 2.0F * tanh_argument(z, z * z * z);
  const float e = expf(-fabsf(argument));
  const float inverse = 1.0F / (1.0F + e);
  return {e, inverse, argument < 0.0F ? e * inverse : inverse};
}

SNUG_DEVICE float gelu(float z) { return z * gelu_terms(z).factor; }

/// d gelu / dz = f + z f (1 - f) du,  f = 1 / (1 + exp(-2 u)),  f (1 - f) = e / (1 + e)^2,  du = 2 sqrt(2 / pi) (1 + 3
/// * 0.044715 z^2).
SNUG_DEVICE float gelu_derivative(float z) {
  const GeluTerms t = gelu_terms(z);
  const float slope = 2.0F * kGeluScale * (1.0F + 3.0F * kGeluCubic * z * z);
  return t.factor + z * t.e * t.inverse * t.inverse * slope;
}

/// The ways to compute with FP16. They have not been compared in time on a GPU: the choice is by error.
enum class HalfVariant {
  kFloat,      ///< FP32 between load and store, with exp: what bias_gelu uses
  kFloatTanh,  ///< FP32 between load and store, with tanh
  kHalf2,      ///< sum, cube and last product in packed FP16, tanh in FP32
  kHalf2Tanh,  ///< all in packed FP16, tanh by h2tanh
};

template <HalfVariant variant>
SNUG_DEVICE float float_gelu(float z) {
  if constexpr (variant == HalfVariant::kFloat) {
    return gelu(z);
  } else {
    return 0.5F * z * (1.0F + float_tanh(tanh_argument(z, z * z * z)));
  }
}

SNUG_DEVICE float tanh_factor(Half z, Half cube) {
  return 0.5F * (1.0F + float_tanh(tanh_argument(to_float(z), to_float(cube))));
}

SNUG_DEVICE Half2 both(float value) { return pack(to_half(value), to_half(value)); }

/// gelu(x + bias), two at a time.
template <HalfVariant variant>
SNUG_DEVICE Half2 bias_gelu(Half2 x, Half2 bias) {
  if constexpr (variant == HalfVariant::kFloat || variant == HalfVariant::kFloatTanh) {
    return pack(to_half(float_gelu<variant>(to_float(lower(x)) + to_float(lower(bias)))),
                to_half(float_gelu<variant>(to_float(upper(x)) + to_float(upper(bias)))));
  } else {
    const Half2 z = add(x, bias);
    const Half2 cube = multiply(multiply(z, z), z);
    if constexpr (variant == HalfVariant::kHalf2) {
      return multiply(z,
                      pack(to_half(tanh_factor(lower(z), lower(cube))), to_half(tanh_factor(upper(z), upper(cube)))));
    } else {
      const Half2 argument = multiply(both(kGeluScale), add(z, multiply(both(kGeluCubic), cube)));
      return multiply(z, multiply(both(0.5F), add(both(1.0F), half_tanh(argument))));
    }
  }
}

}  // namespace snug::kernels::detail
