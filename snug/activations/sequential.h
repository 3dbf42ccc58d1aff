#pragma once
// checkpoint_sequential: a chain of layers in segments, each of which keeps only its input.
//
//   Tensor y = snug::checkpoint_sequential(model, 4, x);   // 4 segments; the last runs plain, as in Python
//   Tensor z = snug::checkpoint_sequential(model, 0, x);   // about sqrt(n) of n layers

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Sequential;
}

namespace snug {

/// Treatment of the last segment. Backward begins with it, so recomputing it saves memory only while the others run
/// forward.
enum class LastSegment {
  Plain,      ///< Python's rule: keep its activations
  Recompute,  ///< checkpoint it like the others
};

/// Runs `layers` one after the other on `input`. With n layers, each of the first `segments` - 1 segments has n /
/// segments layers (rounded down) and is checkpointed; the last has the rest. As in torch/utils/checkpoint.py.
///
/// With `segments` = 0 there are about sqrt(n) segments, which is near the least peak if all layers save about as much.
/// If layers differ, or a certain number of bytes must be kept, plan_activations() chooses better
/// (snug/remat/rematerialize.h). Throws ConfigError unless 0 <= segments <= n and n > 0.
at::Tensor checkpoint_sequential(const std::vector<std::function<at::Tensor(at::Tensor)>>& layers, int64_t segments,
                                 at::Tensor input, LastSegment last = LastSegment::Plain);

/// The same for the modules of a Sequential, each of which must take one tensor and return one.
at::Tensor checkpoint_sequential(torch::nn::Sequential layers, int64_t segments, at::Tensor input,
                                 LastSegment last = LastSegment::Plain);

}  // namespace snug
