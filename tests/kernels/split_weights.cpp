#include "tests/kernels/split_weights.h"

#include <algorithm>

// Compiles what follows once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/kernels/split_weights.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "src/kernels/split_weights_simd.h"

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
constexpr size_t kMostLanes = HWY_MAX_BYTES / sizeof(float);

// What does not fill a vector is moved to where it does.

void split(const float* weights, BFloat16* rounded, int8_t* correction, int64_t count) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; count >= lanes; count -= lanes, weights += lanes, rounded += lanes, correction += lanes) {
    store_split(d, hn::LoadU(d, weights), rounded, correction);
  }
  float w[kMostLanes] = {};
  BFloat16 r[kMostLanes];
  int8_t c[kMostLanes];
  std::copy_n(weights, count, w);
  store_split(d, hn::LoadU(d, w), r, c);
  std::copy_n(r, count, rounded);
  std::copy_n(c, count, correction);
}

void join(const BFloat16* rounded, const int8_t* correction, float* weights, int64_t count) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; count >= lanes; count -= lanes, weights += lanes, rounded += lanes, correction += lanes) {
    hn::StoreU(load_split(d, rounded, correction), d, weights);
  }
  float w[kMostLanes];
  BFloat16 r[kMostLanes] = {};
  int8_t c[kMostLanes] = {};
  std::copy_n(rounded, count, r);
  std::copy_n(correction, count, c);
  hn::StoreU(load_split(d, r, c), d, w);
  std::copy_n(w, count, weights);
}

}  // namespace
}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace snug::kernels {

HWY_EXPORT(split);
HWY_EXPORT(join);

void split_weights(const float* weights, BFloat16* rounded, int8_t* correction, int64_t count) {
  HWY_DYNAMIC_DISPATCH(split)(weights, rounded, correction, count);
}
void join_weights(const BFloat16* rounded, const int8_t* correction, float* weights, int64_t count) {
  HWY_DYNAMIC_DISPATCH(join)(rounded, correction, weights, count);
}

}  // namespace snug::kernels
#endif
