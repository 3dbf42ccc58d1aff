#pragma once
// What needs CUDA's own headers, behind two functions: cuda_memory.cpp where snug is built with CUDA, no_cuda_memory.cpp
// otherwise.

#include <cstdint>

#include <c10/core/Device.h>

namespace snug::detail {

/// Limits the caching allocator of `device` (which must be ready(), see device.h) to `bytes` unless it is limited to less; returns the
/// fraction that held before.
/// Throws ConfigError if snug was built without CUDA.
double set_cuda_limit(c10::Device device, int64_t bytes);
void restore_cuda_fraction(c10::Device device, double fraction) noexcept;

}  // namespace snug::detail
