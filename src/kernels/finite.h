#pragma once
// Looking for infinities and NaN, without writing. On plain memory.

#include <cstdint>

namespace snug::kernels {

/// Whether none of the `count` values is infinite or NaN.
bool all_finite(const float* values, int64_t count);

}  // namespace snug::kernels
