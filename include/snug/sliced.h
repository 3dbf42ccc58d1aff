#pragma once
// checkpoint() applied to the parts of a chain of layers, and to the slices of an input.
//
// checkpoint_sequential: a chain of layers in segments, each of which keeps only its input.
//
//   Tensor y = snug::checkpoint_sequential(model, 4, x);   // 4 segments; the last runs plain, as in Python
//   Tensor z = snug::checkpoint_sequential(model, 0, x);   // about sqrt(n) of n layers
//
// sliced: runs a part of the forward on slice after slice of its input, each slice checkpointed. Only the activations
// of a single slice are alive at a time. For a sample whose first layers do not fit into memory: a picture of a
// gigapixel, a cloud of ten million points.
//
//   // points: [1, 10'000'000, 3]. Each point by itself, then the largest of each feature in a slice: [1, slices, 256].
//   auto each = [this](Tensor points) { return torch::amax(features->forward(points), 1, /*keepdim=*/true); };
//   Tensor cloud = torch::amax(snug::sliced(each, points, {.dim = 1}), 1);

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/checkpoint.h"

namespace torch::nn {
class Sequential;
}

namespace snug {

/// The treatment of the last segment. Backward begins with the last segment, so recomputing the last segment saves
/// memory only while the other segments run forward.
enum class LastSegment {
  Plain,      ///< Python's rule: keep the segment's activations
  Recompute,  ///< checkpoint the segment like the others
};

/// Runs `layers` on `input`, layer after layer. With n layers, each of the first `segments` - 1 segments has n /
/// segments layers (rounded down) and is checkpointed; the last segment has the rest. The cuts are those of
/// torch/utils/checkpoint.py.
///
/// With `segments` = 0 the number of segments is about sqrt(n), which is near the least peak if all layers save about
/// as much. If layers differ, or a certain number of bytes must be kept, plan_activations() chooses better
/// (include/snug/plan.h). Throws ConfigError unless 0 <= segments <= n and n > 0.
at::Tensor checkpoint_sequential(const std::vector<std::function<at::Tensor(at::Tensor)>>& layers, int64_t segments,
                                 at::Tensor input, LastSegment last = LastSegment::Plain);

/// The same for the modules of a Sequential. Each module must take one tensor and return one tensor.
at::Tensor checkpoint_sequential(torch::nn::Sequential layers, int64_t segments, at::Tensor input,
                                 LastSegment last = LastSegment::Plain);

struct SlicedOptions {
  /// The dimension along which the input is cut and the results are joined. A negative number counts from the end.
  int64_t dim = 0;
  /// The number of slices, at most the length of `dim`. 0: the number that the plan of a Stepper with a budget
  /// asks for, or 1 outside of a plan.
  int64_t slices = 0;
  /// The length of every slice but the last is a multiple of this number: for layers that take, say, groups of four
  /// points.
  int64_t multiple = 1;
  /// Options for the checkpoint of each slice.
  CheckpointOptions checkpoint = {};
};

/// Cuts `input` along `dim` into slices of equal length (the last may be shorter), calls `fn` on each slice as
/// snug::checkpoint does, and returns the results, concatenated along `dim`. With one slice the call is a plain
/// `fn(input)`.
/// - Suitable: an `fn` that treats the positions along `dim` independently (linear layers, pointwise layers, norms of
///   features), or an `fn` that returns a sum or a maximum over the positions with length 1 along `dim`, if the caller
///   then takes the sum or the maximum of the result.
/// - Not suitable: layers that look across `dim` (convolutions along `dim`, attention, BatchNorm's statistics).
/// - The result of a suitable `fn` equals `fn(input)`, up to the rounding of sums. Gradients of parameters are sums
///   over the slices, so gradients differ by the rounding of a sum in another order, and, for a maximum that occurs
///   several times, by LibTorch's division of the gradient among the maxima.
/// - Random layers draw slice after slice, so the numbers differ from the numbers for the whole input.
/// - Inside another `sliced` whose number of slices is left to a plan, give the inner `sliced` a number of its own.
///
/// Throws ConfigError if the input has no dimension `dim`, if slices < 0 or multiple < 1, or if a result has no
/// dimension `dim`.
at::Tensor sliced(const std::function<at::Tensor(at::Tensor)>& fn, const at::Tensor& input, SlicedOptions options = {});

}  // namespace snug
