#include "src/kernels/finite.h"

#include <algorithm>
#include <cmath>

// Compiles what follows once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/finite.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace snug::kernels::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// A value times zero is zero if the value is finite, and NaN if not; a sum with NaN in it stays NaN. Four sums, so that
// none waits for another.
bool finite(const float* values, int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto zero = hn::Zero(d);
  auto a = zero, b = zero, c = zero, e = zero;
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    a = hn::MulAdd(hn::LoadU(d, values + i), zero, a);
    b = hn::MulAdd(hn::LoadU(d, values + i + lanes), zero, b);
    c = hn::MulAdd(hn::LoadU(d, values + i + 2 * lanes), zero, c);
    e = hn::MulAdd(hn::LoadU(d, values + i + 3 * lanes), zero, e);
  }
  const auto sum = hn::Add(hn::Add(a, b), hn::Add(c, e));
  return hn::AllTrue(d, hn::Eq(sum, zero)) &&
         std::all_of(values + i, values + count, [](float value) { return std::isfinite(value); });
}

}  // namespace
}  // namespace snug::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace snug::kernels {

HWY_EXPORT(finite);

bool all_finite(const float* values, int64_t count) { return HWY_DYNAMIC_DISPATCH(finite)(values, count); }

}  // namespace snug::kernels
#endif
