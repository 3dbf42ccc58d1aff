#pragma once
// Batch normalisation over micro-batches. Each is normalised by its own mean and variance, which are the noisier the smaller it is, and the
// running statistics, which evaluation uses, move once for each. What repairs what:
//
//   adjust_batch_norm_momentum   the running statistics' pace; the normalisation in training is as noisy as before
//   precise_batch_norm           the running statistics themselves, by a pass over data at the end of training (or before an evaluation)
//   FrozenBatchNorm              both, by leaving the statistics of earlier training in place: for fine-tuning
//   batch_norm_to_group_norm     both, by a layer that looks at one sample alone, so that accumulation changes nothing; another model, to be
//                                trained from its start
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

/// While it lives, the BatchNorms of a module are in evaluation mode, while the rest trains on: they normalise with their running statistics
/// and leave these alone; weight and bias are trained as ever. Those that were training are so again afterwards. Module::train() in between
/// ends it early, so call that before.
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

/// Sets the running mean and variance of every BatchNorm in `module` to those of all that passes it in `forward`, which is to run the model
/// over as many batches as seem enough (some thousand samples) on this thread:
///
///   snug::precise_batch_norm(*model, [&] { for (const auto& batch : batches) model->forward(batch.input); });
///
/// Each batch is normalised by its own statistics, as in training; batches of the size of a micro-batch give what training saw (Wu & Johnson
/// 2021, "Rethinking 'Batch' in BatchNorm", arXiv:2105.07576, section 3). Mean and variance are exact over all values of a channel, however
/// they are divided into batches, the variance with n - 1 as in torch. `forward` runs without gradients, with all other modules (dropout) in
/// evaluation mode. Otherwise nothing changes: modes, momenta, num_batches_tracked, and after an exception the running statistics are what
/// they were. Returns the number of values per channel that the first BatchNorm saw. Throws ConfigError if there is no BatchNorm with running
/// statistics, or, naming it, if none or only one value per channel passed one.
int64_t precise_batch_norm(torch::nn::Module& module, const std::function<void()>& forward);

/// What batch_norm_to_group_norm did.
struct GroupNormChange {
  std::string name;  ///< of the layer, as in named_modules(): "stem.norm"
  int64_t channels;
  int64_t groups;
};

/// Replaces every BatchNorm in `module` with a GroupNorm (Wu & He 2018, arXiv:1803.08494) of as many groups, up to `groups`, as divide its
/// channels. eps, weight and bias (copied), their requires_grad, dtype, device and the mode stay. A GroupNorm needs several values to a group:
/// on [N, channels] keep `groups` below the channels. Parameters are new: make the optimizer afterwards.
/// Reaches the BatchNorms in a Sequential, a ModuleList, a ModuleDict and those that a module has only registered and finds by name. Code that
/// casts such a module to BatchNorm must change with it. A BatchNorm that anything else holds, such as a member of its own type or a variable,
/// cannot be replaced behind its back. Then nothing is changed, and a ConfigError names the layer and says what to write. Also throws
/// ConfigError if `module` itself is a BatchNorm or has none, or if groups < 1.
std::vector<GroupNormChange> batch_norm_to_group_norm(torch::nn::Module& module, int64_t groups = 32);

}  // namespace snug
