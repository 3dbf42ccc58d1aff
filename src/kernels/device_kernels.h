#pragma once
// snug's own CUDA kernels, for tensors: cuda_kernels.cpp where snug is built with nvcc, else no_cuda_kernels.cpp.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "src/kernels/update_table.h"

namespace snug::kernels::detail {

/// Whether there is a kernel of bias_gelu for x's device and dtype. If not, the next two must not be called.
bool has_bias_gelu_kernel(const at::Tensor& x);

/// gelu(x + bias), where bias may be undefined.
at::Tensor device_bias_gelu(const at::Tensor& x, const at::Tensor& bias);

/// grad * gelu'(x + bias).
at::Tensor device_bias_gelu_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& bias);

/// Starts the update of a table on a stream of the current device, without waiting. Throws Error.
using UpdateLauncher = void (*)(const UpdateTable& table, c10::Stream stream);

/// Null if there is no kernel for the device.
UpdateLauncher cuda_update_launcher(c10::Device device);

}  // namespace snug::kernels::detail
