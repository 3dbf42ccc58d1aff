#pragma once
// sliced: run a part of the forward on one slice of its input after the other, each checkpointed, for a single sample whose first layers do not
// fit into memory: a picture of a gigapixel, a cloud of ten million points. Only one slice's activations are alive at a time.
//
//   // points: [1, 10'000'000, 3]. Each point by itself, then the largest of each feature in a slice; so slices give [1, slices, 256].
//   auto each = [this](Tensor points) { return torch::amax(features->forward(points), 1, /*keepdim=*/true); };
//   Tensor cloud = torch::amax(snug::sliced(each, points, {.dim = 1}), 1);

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include "snug/activations/checkpoint.h"

namespace snug {

struct SlicedOptions {
  /// Along which the input is cut, and the results are joined. Counted from the end if negative.
  int64_t dim = 0;
  /// How many slices, as far as there are so many. 0: as many as the plan of a Stepper with a memory_budget asks for, 1 outside of one.
  int64_t slices = 0;
  /// Slices but the last are this many long, or several times: for layers that take, say, groups of four points.
  int64_t multiple = 1;
  /// Of each slice.
  CheckpointOptions checkpoint = {};
};

/// Cuts `input` along `dim` into slices of equal length (the last may be shorter), calls `fn` on each as snug::checkpoint does, and returns
/// what it gave, concatenated along `dim`. In one slice, `fn(input)` as it is.
/// It is for an `fn` that treats places along `dim` independently (linear layers, pointwise ones, norms of features), or that returns a sum or
/// a maximum over them with a length of 1 there, of which the caller takes the sum or the maximum. Then the result is that of `fn(input)`, but for
/// the rounding of sums; gradients of parameters are sums over the slices, so they differ from those of the whole by the rounding of a sum in
/// another order (and, of a maximum that is there several times, by how LibTorch shares it out). Random layers draw slice after slice, and so
/// other numbers than for the whole. It is not for layers that look across (convolutions along `dim`, attention, BatchNorm's statistics). In
/// another `sliced` whose number is left to a plan, give the inner one its own.
/// Throws ConfigError if `dim` is none of the input's, slices < 0 or multiple < 1, or a result has no such dimension.
at::Tensor sliced(const std::function<at::Tensor(at::Tensor)>& fn, const at::Tensor& input, SlicedOptions options = {});

}  // namespace snug
