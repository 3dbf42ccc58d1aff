#pragma once
// Cross entropy from logits to loss without a matrix of log-probabilities.
//
//   Tensor loss = snug::cross_entropy(model->forward(x), target, {.reduction = snug::Reduction::Mean});
//
// If the logits come from a linear layer that may be part of the loss, chunked_cross_entropy saves even the logits.

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "snug/activations/chunked_loss.h"

namespace snug {

struct CrossEntropyOptions {
  Reduction reduction = Reduction::Sum;
  /// Targets of this value count neither in the loss nor in Mean's divisor.
  int64_t ignore_index = -100;
  /// In [0, 1]: weight of the uniform distribution in the target (Szegedy et al. 2016, arXiv:1512.00567).
  double label_smoothing = 0.0;
};

/// Cross entropy of softmax(logits) and target. `logits`: [..., classes], floating; `target`: int64, with the leading
/// sizes of `logits`. Returns an FP32 (or FP64) scalar. 16-bit logits are computed with in FP32, in groups of rows. The
/// mean over no targets is NaN, as LibTorch's.
///
/// Keeps the logits (which it never writes to) and the target. Backward's peak is the logits and their gradient. In
/// comparison, at::cross_entropy_loss keeps log-probabilities, beside the logits if those are alive elsewhere, and
/// holds two gradients, all in FP32 under autocast.
///
/// For FP32 and FP64 the loss and the gradient have the bits of at::cross_entropy_loss(logits, target). Exception: for
/// Mean with label smoothing the loss's last bits may differ. Backward may be differentiated again, as LibTorch's.
/// Throws ConfigError, with the shapes, if they do not fit. A target out of range is LibTorch's error.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target, CrossEntropyOptions options = {});

}  // namespace snug
