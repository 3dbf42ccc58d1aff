#pragma once
// The functions that need CUDA's own headers: cuda_memory.cpp defines them where snug is built with CUDA,
// no_cuda_memory.cpp otherwise.

#include <cstdint>

#include <c10/core/Device.h>

namespace snug::detail {

/// Limits the caching allocator of `device` to `bytes`, unless its limit is lower already. `device` must be ready()
/// (see device.h). Returns the memory fraction that was set before.
double set_cuda_limit(c10::Device device, int64_t bytes);
void restore_cuda_fraction(c10::Device device, double fraction) noexcept;

}  // namespace snug::detail
