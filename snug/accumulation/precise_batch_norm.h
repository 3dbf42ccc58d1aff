#pragma once
// precise_batch_norm: running statistics by a pass over data. batch_norm.h compares it with other remedies.

#include <cstdint>
#include <functional>

namespace torch::nn {
class Module;
}

namespace snug {

/// Sets the running mean and variance of every BatchNorm in `module` to those of all values that pass it in `forward`.
/// `forward` must run the model on this thread over enough batches (some thousand samples):
///
///   snug::precise_batch_norm(*model, [&] { for (const auto& batch : batches) model->forward(batch.input); });
///
/// Each batch is normalised by its own statistics, as in training. Batches of the size of a micro-batch give the
/// statistics that training saw (Wu & Johnson 2021, "Rethinking 'Batch' in BatchNorm", arXiv:2105.07576, section 3).
/// Mean and variance are exact over all values of a channel, however these are divided into batches; the variance has
/// the divisor n - 1, as in torch. `forward` runs without gradients, with all other modules (dropout) in evaluation
/// mode. Modes, momenta and num_batches_tracked do not change. After an exception the running statistics are the old
/// ones.
/// Returns the number of values per channel that the first BatchNorm saw. Throws ConfigError if there is no BatchNorm
/// with running statistics, or if at most one value per channel passed one of them (the message names it).
int64_t precise_batch_norm(torch::nn::Module& module, const std::function<void()>& forward);

}  // namespace snug
