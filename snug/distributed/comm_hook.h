#pragma once
// How a bucket of gradients is summed over the ranks: as it is, in 16 bits, or as you like.
//
//   snug::DataParallel ddp(model, group, {.hook = snug::bfloat16_hook()});
//   snug::DataParallel own(model, group, {.hook = [](snug::GradientBucket bucket, snug::ProcessGroup& g) {
//     return g.start_all_reduce(bucket.gradients);
//   }});

#include <cstddef>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

class ProcessGroup;

struct GradientBucket {
  size_t index = 0;                         ///< from 0, in the order in which backward completes them
  at::Tensor gradients = {};                ///< the gradients of `parameters`, one after another: 1-D
  std::vector<at::Tensor> parameters = {};  ///< in the same order
};

/// Called when backward has completed a bucket: starts the communication, and returns a function which ends it and
/// leaves in `bucket.gradients` the sum over all ranks. Those functions are called in order of the buckets, after the
/// last bucket was started: what travels meanwhile is hidden behind backward. DataParallel divides for the mean, before
/// it calls the hook. A hook that throws must have sent nothing. Where a Stepper then drops the step, it is called for
/// the same bucket once more, with zeros.
using CommHook = std::function<std::function<void()>(GradientBucket bucket, ProcessGroup& group)>;

/// Half the bytes: gradients travel, and are added, as FP16. What exceeds 65504, the sum included, becomes infinite.
CommHook float16_hook();
/// Half the bytes, with FP32's range and 8 bits of precision.
CommHook bfloat16_hook();

}  // namespace snug
