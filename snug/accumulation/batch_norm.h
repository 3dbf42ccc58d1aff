#pragma once
// Batch normalisation over micro-batches: its running statistics move once for each micro-batch, so K of them move it
// further than the one batch that they make up. This sets the momentum right.
//
//   snug::adjust_batch_norm_momentum(*model, 8);    // once, before training with 8 micro-batches per step

#include <cstdint>

namespace torch::nn {
class Module;
}

namespace snug {

/// Sets the momentum m of every BatchNorm1d, 2d and 3d in `module`, and of classes derived from those, to 1 - (1 -
/// m)^(1 / micro_batches), and returns the new value of the first in the order of Module::modules(). Of the running
/// statistics before the step, (1 - m) is then left after it, as with one batch. K updates with equal statistics give
/// that batch's running mean and variance; where they differ, later micro-batches weigh slightly more, and the variance
/// within micro-batches is taken for that of the batch. The normalisation itself still uses each micro-batch's own
/// statistics, so training is not the same as with one batch. Each call starts from the momentum that is set: call it
/// once. Passed over: modules without running statistics, and those with a cumulative average (momentum without a
/// value), in which micro-batches weigh the same anyway. With micro_batches 1 nothing changes. Throws ConfigError, and
/// has changed nothing, if micro_batches < 1, if there is no module to adjust, or if a momentum is not from 0 to 1.
double adjust_batch_norm_momentum(torch::nn::Module& module, int64_t micro_batches);

}  // namespace snug
