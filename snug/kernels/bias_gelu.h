#pragma once
// bias_gelu: the activation of a transformer's MLP, and the bias before it, in one pass over memory.
//
//   Tensor hidden = snug::bias_gelu(torch::matmul(x, weight.t()), bias);

#include <ATen/core/Tensor.h>

namespace snug {

/// gelu(x + bias), with gelu(z) = z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) (Hendrycks & Gimpel 2016, arXiv:1606.08415).
/// `x`: [..., columns], floating; `bias`: [columns], of the same dtype and device, or undefined for none. Returns a tensor like x.
///
/// Saves x and the bias for backward, not their sum, which backward makes again: where x stays alive for another reason, one activation
/// less than at::gelu(x + bias) holds. Backward may be differentiated again. Deterministic.
///
/// On a CPU, and wherever snug has no kernel, value and gradients are those of at::gelu(x + bias, "tanh") to the bit. The kernel (a CUDA
/// build of snug; FP16, BF16, FP32) calculates in FP32 between load and store: the sum is not rounded to 16 bits, so its 16-bit results are
/// nearer to the exact ones than that composition's. The bias's gradient is the sum of x's rounded one over all but the last dimension.
///
/// Under autocast for x's device the bias is cast to x's dtype, as autocast does with the bias of a linear layer; x is taken as it comes.
///
/// Gpt does not call it: on a CPU at::linear adds the bias within the matrix product, in one pass over memory less and
/// with other bits; the CUDA kernel has not run on a GPU.
///
/// Throws ConfigError, with the shapes and dtypes, where they do not fit.
at::Tensor bias_gelu(const at::Tensor& x, const at::Tensor& bias = {});

}  // namespace snug
