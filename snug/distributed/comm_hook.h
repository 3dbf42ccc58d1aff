#pragma once
// The way in which a bucket of gradients is summed over the ranks: unchanged, in 16 bits, or by a function of your own.
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

/// Called when backward has completed a bucket. Starts the communication, and returns a function that ends it and
/// leaves the sum over all ranks in `bucket.gradients`. These functions are called in the order of the buckets, after
/// the last bucket was started: communication before that is hidden behind backward. For the mean, DataParallel divides
/// before it calls the hook. A hook that throws must have sent nothing. If a Stepper then drops the step, it calls the
/// hook for the same bucket once more, with zeros.
using CommHook = std::function<std::function<void()>(GradientBucket bucket, ProcessGroup& group)>;

/// Half the bytes: gradients are sent, and added, as FP16. Values beyond 65504, those of the sum included, become
/// infinite.
CommHook float16_hook();
/// Half the bytes, with FP32's range and 8 bits of precision.
CommHook bfloat16_hook();

}  // namespace snug
