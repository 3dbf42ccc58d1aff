#pragma once
// bias_gelu's CUDA kernel for tensors: cuda_bias_gelu.cpp where snug is built with it, else no_cuda_kernels.cpp.

#include <ATen/core/Tensor.h>

namespace snug::kernels::detail {

/// Whether there is a kernel for x's device and dtype. If not, the functions below must not be called.
bool has_bias_gelu_kernel(const at::Tensor& x);

/// gelu(x + bias), where bias may be undefined.
at::Tensor device_bias_gelu(const at::Tensor& x, const at::Tensor& bias);

/// grad * gelu'(x + bias).
at::Tensor device_bias_gelu_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& bias);

}  // namespace snug::kernels::detail
