#pragma once
// chunked_cross_entropy: the loss of a language model's head without the matrix of logits. For 8,192 tokens and a
// vocabulary of 50,000 the matrix takes 1.6 GB in FP32, and twice as much with its gradient. Here only one chunk of the
// matrix's rows exists at a time.
//
//   Tensor sum = snug::chunked_cross_entropy(model->hidden(tokens), model->head_weight(), targets);

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "snug/core.h"

namespace snug {

/// Options of chunked_cross_entropy.
struct ChunkedLossOptions {
  /// Rows of logits alive at once. A larger chunk makes fewer, more efficient products; a smaller chunk takes less
  /// memory.
  int64_t chunk = 4096;
  Reduction reduction = Reduction::Sum;
  /// Targets of this value count neither in the loss nor in Mean's divisor.
  int64_t ignore_index = -100;
  /// The weight of the uniform distribution in the target, in [0, 1] (Szegedy et al. 2016, arXiv:1512.00567).
  double label_smoothing = 0.0;
  /// Added to the logits, shape [vocabulary]; undefined for none.
  at::Tensor bias = {};
};

/// Cross entropy between hidden * weight^T (+ bias) and target.
/// - `hidden`: [..., width]; `weight`: [vocabulary, width]; `target`: int64, with the leading sizes of `hidden`.
/// - Returns an FP32 (or FP64) scalar. Rows are independent, so the result equals the unchunked loss up to the order of
///   the sum. The mean over no targets (none given, or all ignored) is NaN, as in LibTorch; the sum is 0.
/// - Backward computes each chunk's logits again: four matrix products instead of three.
/// Throws ConfigError, with the shapes, if the shapes do not fit. A target that is neither ignored nor in [0,
/// vocabulary) is LibTorch's error.
at::Tensor chunked_cross_entropy(at::Tensor hidden, at::Tensor weight, at::Tensor target,
                                 ChunkedLossOptions options = {});

}  // namespace snug
