#pragma once
// bias_gelu on a GPU: the functions of bias_gelu_cuda.cu, on plain device pointers and without torch's or CUDA's
// headers.

#include <cstdint>

namespace snug::kernels::detail {

enum class KernelDtype { kFloat32, kFloat16, kBFloat16 };

/// Row-major [rows, columns], without gaps. `bias` holds `columns` elements, or is null.
struct BiasGeluShape {
  int64_t rows = 0;
  int64_t columns = 0;
};

// Both start the work on `stream` (a cudaStream_t) of the current device and return a cudaError_t, 0 for success,
// without waiting. Each output may be one of the inputs of its shape.

/// y = gelu(x + bias), summed and calculated in FP32.
int launch_bias_gelu(KernelDtype dtype, const void* x, const void* bias, void* y, BiasGeluShape shape, void* stream);

/// dx = dy * gelu'(x + bias), likewise.
int launch_bias_gelu_backward(KernelDtype dtype, const void* dy, const void* x, const void* bias, void* dx,
                              BiasGeluShape shape, void* stream);

}  // namespace snug::kernels::detail
