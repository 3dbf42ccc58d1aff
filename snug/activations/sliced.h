#pragma once
// sliced: runs a part of the forward on one slice of its input after the other, each checkpointed. For a single sample
// whose first layers do not fit into memory: a picture of a gigapixel, a cloud of ten million points. Only one slice's
// activations are alive at a time.
//
//   // points: [1, 10'000'000, 3]. Each point by itself, then the largest of each feature in a slice: [1, slices, 256].
//   auto each = [this](Tensor points) { return torch::amax(features->forward(points), 1, /*keepdim=*/true); };
//   Tensor cloud = torch::amax(snug::sliced(each, points, {.dim = 1}), 1);

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include "snug/activations/checkpoint.h"

namespace snug {

struct SlicedOptions {
  /// The dimension along which the input is cut and the results are joined. Counted from the end if negative.
  int64_t dim = 0;
  /// Number of slices, at most the length of `dim`. 0: the number that the plan of a Stepper with a memory_budget asks
  /// for, or 1 outside of one.
  int64_t slices = 0;
  /// The length of every slice but the last is a multiple of this: for layers that take, say, groups of four points.
  int64_t multiple = 1;
  /// Options for the checkpoint of each slice.
  CheckpointOptions checkpoint = {};
};

/// Cuts `input` along `dim` into slices of equal length (the last may be shorter), calls `fn` on each as
/// snug::checkpoint does, and returns the results, concatenated along `dim`. With one slice it is a plain `fn(input)`.
/// - Suitable: an `fn` that treats the places along `dim` independently (linear layers, pointwise ones, norms of
///   features), or one that returns a sum or a maximum over them with length 1 along `dim`, if the caller then takes
///   the sum or the maximum of the result.
/// - Not suitable: layers that look across `dim` (convolutions along it, attention, BatchNorm's statistics).
/// - The result is then that of `fn(input)`, up to the rounding of sums. Gradients of parameters are sums over the
///   slices, so they differ by the rounding of a sum in another order, and, for a maximum that occurs several times, by
///   the way in which LibTorch shares its gradient out.
/// - Random layers draw slice after slice, so their numbers differ from those for the whole input.
/// - Inside another `sliced` whose number of slices is left to a plan, give the inner one a number of its own.
/// Throws ConfigError if the input has no dimension `dim`, if slices < 0 or multiple < 1, or if a result has no such
/// dimension.
at::Tensor sliced(const std::function<at::Tensor(at::Tensor)>& fn, const at::Tensor& input, SlicedOptions options = {});

}  // namespace snug
