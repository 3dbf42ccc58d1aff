// The vectors of the kernels: Highway's, or, in a source that defines SNUG_ONE_LANE, Highway's functions for vectors of
// one element, as far as the kernels call them. So the formulas of the kernels, the headers *_simd.h, compile for a
// GPU, too, with the CPU's order of operations and the CPU's rounding: nothing is contracted or approximated, and
// MulAdd is fused, as on all CPUs with AVX2. Any compiler of C++ compiles them for tests, with -ffp-contract=off.
#if !defined(SNUG_ONE_LANE)
#include <hwy/highway.h>
#elif !defined(SNUG_KERNELS_ONE_LANE)
#define SNUG_KERNELS_ONE_LANE

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "src/kernels/host_device.h"

#define HWY_INLINE SNUG_HOST_DEVICE
#define HWY_NAMESPACE N_ONE_LANE
#define HWY_BEFORE_NAMESPACE() static_assert(true)
#define HWY_AFTER_NAMESPACE() static_assert(true)
#define HWY_MAX_BYTES 4

namespace hwy::N_ONE_LANE {

/// The kind of a vector: one T.
template <class T>
struct One {
  using Value = T;
};

template <class T>
using ScalableTag = One<T>;
template <class D>
using Vec = typename D::Value;
template <class T, class D>
using Rebind = One<T>;
template <class D>
using RebindToUnsigned = One<uint32_t>;
template <class D>
using RebindToSigned = One<int32_t>;

HWY_INLINE size_t Lanes(One<float>) { return 1; }

template <class T, class From>
HWY_INLINE T Set(One<T>, From value) {
  return static_cast<T>(value);
}
HWY_INLINE float Zero(One<float>) { return 0; }
HWY_INLINE uint32_t Iota(One<uint32_t>, uint32_t first) { return first; }
template <class T>
HWY_INLINE T LoadU(One<T>, const T* from) {
  return *from;
}
template <class T>
HWY_INLINE void StoreU(T value, One<T>, T* to) {
  *to = value;
}

// Arithmetic. The compiler of a GPU contracts a product and a sum, unless the functions of CUDA are called.

#if defined(__CUDA_ARCH__)
HWY_INLINE float Mul(float a, float b) { return __fmul_rn(a, b); }
HWY_INLINE float Add(float a, float b) { return __fadd_rn(a, b); }
HWY_INLINE float Sub(float a, float b) { return __fsub_rn(a, b); }
HWY_INLINE float Div(float a, float b) { return __fdiv_rn(a, b); }
HWY_INLINE float Sqrt(float a) { return __fsqrt_rn(a); }
HWY_INLINE float MulAdd(float a, float b, float c) { return __fmaf_rn(a, b, c); }
HWY_INLINE double Mul(double a, double b) { return __dmul_rn(a, b); }
HWY_INLINE double MulAdd(double a, double b, double c) { return __fma_rn(a, b, c); }
#else
inline float Mul(float a, float b) { return a * b; }
inline float Add(float a, float b) { return a + b; }
inline float Sub(float a, float b) { return a - b; }
inline float Div(float a, float b) { return a / b; }
inline float Sqrt(float a) { return std::sqrt(a); }
inline float MulAdd(float a, float b, float c) { return std::fma(a, b, c); }
inline double Mul(double a, double b) { return a * b; }
inline double MulAdd(double a, double b, double c) { return std::fma(a, b, c); }
#endif

HWY_INLINE uint32_t Mul(uint32_t a, uint32_t b) { return a * b; }
HWY_INLINE uint32_t Add(uint32_t a, uint32_t b) { return a + b; }
HWY_INLINE uint32_t Sub(uint32_t a, uint32_t b) { return a - b; }
HWY_INLINE uint32_t And(uint32_t a, uint32_t b) { return a & b; }
HWY_INLINE uint32_t Or(uint32_t a, uint32_t b) { return a | b; }
HWY_INLINE uint32_t Xor(uint32_t a, uint32_t b) { return a ^ b; }
template <int kBits>
HWY_INLINE uint32_t ShiftLeft(uint32_t a) {
  return a << kBits;
}
template <int kBits>
HWY_INLINE uint32_t ShiftRight(uint32_t a) {
  return a >> kBits;
}

// Comparisons.

HWY_INLINE bool Gt(float a, float b) { return a > b; }
HWY_INLINE bool Gt(uint32_t a, uint32_t b) { return a > b; }
HWY_INLINE bool Lt(uint32_t a, uint32_t b) { return a < b; }
HWY_INLINE bool IsNaN(float a) { return a != a; }
template <class T>
HWY_INLINE bool RebindMask(One<T>, bool mask) {
  return mask;
}
template <class T>
HWY_INLINE T IfThenElse(bool mask, T yes, T no) {
  return mask ? yes : no;
}

// Conversions.

template <class To, class From>
HWY_INLINE To BitCast(One<To>, From value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}
HWY_INLINE float ConvertTo(One<float>, int32_t value) { return static_cast<float>(value); }
HWY_INLINE uint32_t PromoteTo(One<uint32_t>, uint16_t value) { return value; }
HWY_INLINE uint16_t TruncateTo(One<uint16_t>, uint32_t value) { return static_cast<uint16_t>(value); }

}  // namespace hwy::N_ONE_LANE

#endif
