#pragma once
// Four remedies for batch normalisation over micro-batches. Each micro-batch is normalised by the micro-batch's own
// mean and variance: the smaller the micro-batch, the noisier the mean and variance. The running statistics, used in
// evaluation, move once for each micro-batch.
//
//   adjust_batch_norm_momentum   corrects the pace of the running statistics; the normalisation in training stays noisy
//   precise_batch_norm           computes the running statistics again, by a pass over data at the end of training or
//                                before an evaluation
//   FrozenBatchNorm              corrects both: keeps the statistics of earlier training, for fine-tuning
//   batch_norm_to_group_norm     corrects both: a layer that looks at one sample alone, so that accumulation changes
//                                nothing. The result is another model, so train the model from the start
//
//   snug::adjust_batch_norm_momentum(*model, 8);    // once, before training with 8 micro-batches per step

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace snug {

/// Sets the running mean and variance of every BatchNorm in `module` to the mean and variance of all values that pass
/// the BatchNorm in `forward`. `forward` must run the model on this thread over enough batches (some thousand samples):
///
///   snug::precise_batch_norm(*model, [&] { for (const auto& batch : batches) model->forward(batch.input); });
///
/// Each batch is normalised by the batch's own statistics, as in training. Batches of the size of a micro-batch give
/// the statistics that training saw (Wu & Johnson 2021, "Rethinking 'Batch' in BatchNorm", arXiv:2105.07576, section
/// 3). Mean and variance are exact over all values of a channel, for any division of the values into batches. The
/// variance has the divisor n - 1, as in torch. `forward` runs without gradients, with all other modules (dropout) in
/// evaluation mode. Modes, momenta and num_batches_tracked do not change. After an exception the running statistics are
/// the old statistics.
/// Returns the number of values per channel that the first BatchNorm saw. Throws ConfigError if `module` has no
/// BatchNorm with running statistics, or if at most one value per channel passed a BatchNorm (the message names the
/// BatchNorm).
int64_t precise_batch_norm(torch::nn::Module& module, const std::function<void()>& forward);

/// One replacement by batch_norm_to_group_norm.
struct GroupNormChange {
  std::string name;  ///< the layer's name, as in named_modules(): "stem.norm"
  int64_t channels;
  int64_t groups;
};

/// Replaces every BatchNorm in `module` with a GroupNorm (Wu & He 2018, arXiv:1803.08494). The number of groups is the
/// largest number up to `groups` that divides the channels. The new layer has the same eps, weight and bias (copied),
/// requires_grad, dtype, device and mode. A GroupNorm needs several values per group: on [N, channels] keep `groups`
/// below the number of channels. The parameters are new, so make the optimizer afterwards.
/// The replacement reaches BatchNorms in a Sequential, a ModuleList and a ModuleDict, and BatchNorms that a module has
/// only registered and finds by name. Code that casts such a module to BatchNorm must be changed. A BatchNorm that also
/// has another owner, a member of the BatchNorm's own type or a variable, cannot be replaced in the other owner.
/// Returns the replacements. Throws ConfigError, and has changed nothing, if a BatchNorm has another owner (the message
/// names the layer and says what to write), if `module` itself is a BatchNorm or has none, or if groups < 1.
std::vector<GroupNormChange> batch_norm_to_group_norm(torch::nn::Module& module, int64_t groups = 32);

/// Sets the momentum m of every BatchNorm1d, 2d and 3d in `module`, and of derived classes, to 1 - (1 - m)^(1 /
/// micro_batches). Returns the new value of the first layer in the order of Module::modules().
/// - Running statistics: after a step, (1 - m) of the value before the step is left, as with one batch. K updates with
///   equal statistics give the running mean and variance of one batch. If the statistics differ, later micro-batches
///   weigh slightly more, and the variance within micro-batches is taken for the variance of the batch.
/// - Normalisation: still by each micro-batch's own statistics, so training is not the same as with one batch.
/// - Each call starts from the momentum that is set, so call adjust_batch_norm_momentum once.
/// - Skipped: modules without running statistics, and modules with a cumulative average (momentum without a value),
///   because micro-batches weigh the same in a cumulative average. With micro_batches 1 nothing changes.
///
/// Throws ConfigError, and has changed nothing, if micro_batches < 1, if `module` has nothing to adjust, or if a
/// momentum is not from 0 to 1.
double adjust_batch_norm_momentum(torch::nn::Module& module, int64_t micro_batches);

/// While a FrozenBatchNorm lives, the BatchNorms of a module are in evaluation mode, and the rest of the module trains
/// on. The BatchNorms normalise with the running statistics and do not change the running statistics. Weight and bias
/// are trained as before. At the end of the scope, the BatchNorms that were training are in training mode again.
/// Module::train() in between ends the freeze early, so call Module::train() before.
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
