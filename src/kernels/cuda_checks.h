#pragma once
// What the starts of CUDA's kernels share.

#include <string_view>

#include <c10/core/Device.h>

namespace snug::kernels::detail {

/// Whether the device is one of those that the kernels are compiled for (src/CMakeLists.txt) or a newer one.
bool has_cuda_kernels(c10::Device device);

/// Throws Error, naming `kernel`, unless `error` (a cudaError_t) is success.
void check_launch(std::string_view kernel, int error);

}  // namespace snug::kernels::detail
