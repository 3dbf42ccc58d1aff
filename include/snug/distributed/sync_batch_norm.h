#pragma once
// SyncBatchNorm: batch normalisation by the mean and variance over the values of all ranks, so N ranks train like a
// single process with the whole batch.
//
//   snug::convert_sync_batch_norm(*model, group);             // before DataParallel and the optimizer are made
//
// With several micro-batches per step, each micro-batch is still normalised by itself: see
// include/snug/extra/batch_norm.h.

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include "snug/distributed/process_group.h"
#include "snug/training_ranks.h"

namespace snug {

/// [N, C, ...] -> the same shape, of 2 to 5 dimensions. Code that looks for a BatchNorm2d takes a SyncBatchNorm for a
/// BatchNorm2d.
/// - In training mode all ranks must call the layer, equally often and in the same order, forward and backward. A
///   checkpoint keeps the received statistics and does not send again.
/// - Every value counts alike, however many values a rank has. A rank may have no values ([0, C, ...]). Running
///   statistics are the same on all ranks.
/// - Weight and bias get each rank's own share of the gradient, for DataParallel to add. A loss that is a mean over a
///   rank's items therefore needs equally many items on each rank, as without SyncBatchNorm.
/// - In evaluation mode, and in a group of one, SyncBatchNorm is torch's batch normalisation, to the bit.
/// Statistics are gathered as mean, variance and count of each rank, and combined in FP64 (Chan, Golub & LeVeque 1979).
/// In FP32, gradients are as close to FP64 gradients as the gradients of a single process. The gradients of several
/// ranks and of a single process differ by rounding, 1e-6 of the whole gradient's norm for a ResNet. The difference is
/// larger in a tensor whose sum nearly cancels, such as a bias before another normalisation; in a tensor of this kind a
/// single process's own error is larger than the difference.
class SyncBatchNormImpl : public torch::nn::BatchNorm2dImpl, public detail::SendsInForward {
 public:
  SyncBatchNormImpl(torch::nn::BatchNormOptions options, std::shared_ptr<ProcessGroup> group);

  /// Throws ConfigError if all ranks together have fewer than two values per channel, and DistributedError if a rank is
  /// lost.
  torch::Tensor forward(const torch::Tensor& input);

  /// The ranks over which the layer takes statistics.
  const ProcessGroup& group() const { return *group_; }
  const ProcessGroup* sends_over() const override { return group_->size() > 1 ? group_.get() : nullptr; }

 protected:
  void _check_input_dim(const torch::Tensor& input) override;

 private:
  friend std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& module,
                                                          const std::shared_ptr<ProcessGroup>& group);
  std::shared_ptr<ProcessGroup> group_;
};
TORCH_MODULE(SyncBatchNorm);

/// Replaces every BatchNorm1d, 2d and 3d in `module` by a SyncBatchNorm and returns their names. Options, mode and the
/// parameter tensors themselves stay, so an optimizer of the parameters goes on. Buffers share memory with the old
/// layer's buffers. Reaches the same layers, and throws the same exceptions, as batch_norm_to_group_norm.
std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& module, const std::shared_ptr<ProcessGroup>& group);

}  // namespace snug
