#pragma once
// Four remedies for batch normalisation over micro-batches. Each micro-batch is normalised by its own mean and
// variance, which are the noisier the smaller it is. The running statistics, which evaluation uses, move once for each
// micro-batch.
//
//   adjust_batch_norm_momentum   corrects the pace of the running statistics; the normalisation in training stays noisy
//   precise_batch_norm           computes the running statistics anew, by a pass over data at the end of training or
//                                before an evaluation
//   FrozenBatchNorm              corrects both: keeps the statistics of earlier training, for fine-tuning
//   batch_norm_to_group_norm     corrects both: a layer that looks at one sample alone, so that accumulation changes
//                                nothing. This is another model, so train it from its start
//
//   snug::adjust_batch_norm_momentum(*model, 8);    // once, before training with 8 micro-batches per step

#include <cstdint>
#include <memory>
#include <vector>

#include "snug/accumulation/batch_norm_to_group_norm.h"
#include "snug/accumulation/precise_batch_norm.h"

namespace torch::nn {
class Module;
}

namespace snug {

/// Sets the momentum m of every BatchNorm1d, 2d and 3d in `module`, and of classes derived from those, to 1 - (1 -
/// m)^(1 / micro_batches). Returns the new value of the first layer in the order of Module::modules().
/// - Running statistics: after a step, (1 - m) of their value before it is left, as with one batch. K updates with
///   equal statistics give that batch's running mean and variance. If the statistics differ, later micro-batches weigh
///   slightly more, and the variance within micro-batches is taken for the variance of the batch.
/// - Normalisation: still by each micro-batch's own statistics, so training is not the same as with one batch.
/// - Each call starts from the momentum that is set, so call it once.
/// - Skipped: modules without running statistics, and modules with a cumulative average (momentum without a value), in
///   which micro-batches weigh the same anyway. With micro_batches 1 nothing changes.
/// Throws ConfigError, and has changed nothing, if micro_batches < 1, if there is no module to adjust, or if a momentum
/// is not from 0 to 1.
double adjust_batch_norm_momentum(torch::nn::Module& module, int64_t micro_batches);

/// While it lives, the BatchNorms of a module are in evaluation mode, while the rest of the module trains on. They
/// normalise with their running statistics and do not change them; weight and bias are trained as before. At the end of
/// the scope, the BatchNorms that were training are in training mode again. Module::train() in between would end the
/// freeze early, so call it before.
class [[nodiscard]] FrozenBatchNorm final {
 public:
  /// Throws ConfigError if `module` has no BatchNorm with running statistics.
  explicit FrozenBatchNorm(torch::nn::Module& module);
  ~FrozenBatchNorm();
  FrozenBatchNorm(const FrozenBatchNorm&) = delete;
  FrozenBatchNorm& operator=(const FrozenBatchNorm&) = delete;

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> were_training_;
};

}  // namespace snug
