#pragma once
// checkpoint_sequential: a chain of layers in segments, each of which keeps only its input.
//
//   Tensor y = snug::checkpoint_sequential(model, 4, x);   // 4 segments; the last runs plain, as in Python
//   Tensor z = snug::checkpoint_sequential(model, 0, x);   // as many as make the peak least

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Sequential;
}

namespace snug {

/// Backward begins with the last segment, so recomputing it saves memory only while the others run forward.
enum class LastSegment {
  Plain,      ///< Python's rule: keep its activations
  Recompute,  ///< checkpoint it like the others
};

/// Runs `layers` one after the other on `input`. With n layers, each of the first `segments` - 1 segments has n / segments
/// layers (rounded down) and is checkpointed; the last has the rest. As in torch/utils/checkpoint.py.
///
/// With `segments` = 0 the number of segments and the cuts are those whose peak is least by the bytes that each layer saves: the inputs of the
/// segments so far, and all that one segment saves. They are measured in the first run with an input of this shape and dtype, in which every
/// layer is a segment of its own, and remembered for this vector (its address and length), of which a few hundred are. Inside of another
/// checkpointed region, or of hooks, nothing is measured: about sqrt(n) segments of equal length.
/// Throws ConfigError unless 0 <= segments <= n and n > 0.
at::Tensor checkpoint_sequential(const std::vector<std::function<at::Tensor(at::Tensor)>>& layers, int64_t segments,
                                 at::Tensor input, LastSegment last = LastSegment::Plain);

/// The same for the modules of a Sequential, each of which must take one tensor and give one.
at::Tensor checkpoint_sequential(torch::nn::Sequential layers, int64_t segments, at::Tensor input,
                                 LastSegment last = LastSegment::Plain);

}  // namespace snug
