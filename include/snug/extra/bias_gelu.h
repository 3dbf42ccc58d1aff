#pragma once
// bias_gelu: the activation of a transformer's MLP, together with the bias before the activation, in one pass over
// memory.
//
//   Tensor hidden = snug::bias_gelu(torch::matmul(x, weight.t()), bias);

#include <ATen/core/Tensor.h>

namespace snug {

/// gelu(x + bias), with gelu(z) = z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) (Hendrycks & Gimpel 2016,
/// arXiv:1606.08415). `x`: [..., columns], floating; `bias`: [columns], of the same dtype and device, or undefined for
/// none. Returns a tensor like x.
///
/// Saves x and the bias for backward, not the sum; backward computes the sum again. If x stays alive for another
/// reason, bias_gelu holds one activation less than at::gelu(x + bias). Backward may be differentiated again.
/// Deterministic.
///
/// On a CPU, and wherever snug has no kernel, value and gradients equal at::gelu(x + bias, "tanh") to the bit. The
/// kernel (in a CUDA build of snug; FP16, BF16, FP32) computes in FP32 between load and store. The kernel does not
/// round the sum to 16 bits, so the kernel's 16-bit results are closer to the exact results than at::gelu(x + bias,
/// "tanh"). The bias's gradient is x's rounded gradient, summed over all but the last dimension.
///
/// Under autocast for x's device the bias is cast to x's dtype, as autocast does with the bias of a linear layer. x is
/// not cast.
///
/// After a linear layer bias_gelu gains nothing: at::linear adds the bias within the matrix product, which saves one
/// pass over memory and gives other bits.
///
/// Throws ConfigError, with the shapes and dtypes, if x and bias do not fit.
at::Tensor bias_gelu(const at::Tensor& x, const at::Tensor& bias = {});

}  // namespace snug
