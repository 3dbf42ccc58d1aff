#pragma once
// Functions of LibTorch that keep less for backward, with the same values and the same gradients, to the bit.
//
//   Tensor h = snug::dropout(snug::relu(norm(x)), 0.1, is_training());
//
// Bytes that autograd keeps, for n elements of FP32 on a CPU:
//
//   function                    at::    here    what is kept here
//   dropout                     4 n     n / 8   one bit an element
//   relu                        4 n     n / 8   one bit an element
//   rms_norm                    8 n     4 n     the input, not its normalised copy
//   rms_norm of BF16            8 n     2 n     neither the copies in FP32
//   layer_norm of BF16 in FP32  4 n     2 n     the input, not autocast's copy of it
//   swiglu                      12 n    8 n     its two inputs, not silu(gate)
//
// cross_entropy is in lean_cross_entropy.h.
// For gelu, silu, mish, elu, softplus and hardtanh LibTorch keeps only the input, for softmax, sigmoid and tanh only
// the result. Nothing can be gained there, so snug has no functions for them (a test checks each).

#include <optional>

#include <ATen/core/Tensor.h>

namespace snug {

/// at::relu. Keeps one bit an element; at::relu keeps its result. So it saves memory if the next function does not keep
/// that result too: a linear layer does, an addition or a pooling by mean does not. Under SaveCompressed its gradient
/// stays exact.
at::Tensor relu(const at::Tensor& x);

/// at::dropout with the same random numbers from the same generator. `p`, in [0, 1]: the probability of zero.
at::Tensor dropout(const at::Tensor& x, double p, bool training = true);

/// at::rms_norm over the last dimensions, whose sizes are `normalized_shape` (Zhang & Sennrich 2019, arXiv:1910.07467).
/// Without `eps`, the epsilon of x's type is used. Computed once more in backward.
at::Tensor rms_norm(const at::Tensor& x, at::IntArrayRef normalized_shape, const at::Tensor& weight = {},
                    std::optional<double> eps = std::nullopt);

/// at::layer_norm over the last dimensions, whose sizes are `normalized_shape`. It saves memory where autocast casts
/// 16-bit inputs to FP32 (on CUDA, and with AutocastOptions::fp32_reductions): at::layer_norm keeps the cast, this
/// function computes it once more in backward. Elsewhere it is at::layer_norm itself.
at::Tensor layer_norm(const at::Tensor& x, at::IntArrayRef normalized_shape, const at::Tensor& weight = {},
                      const at::Tensor& bias = {}, double eps = 1e-5);

/// at::silu(gate) * up, the gated activation of a transformer's MLP (Shazeer 2020, arXiv:2002.05202). silu is computed
/// once more in backward.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace snug
