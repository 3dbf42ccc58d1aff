#pragma once
// SyncBatchNorm: batch normalisation by the mean and variance of what all ranks have together, so that N ranks train as
// one process with the whole batch would.
//
//   snug::convert_sync_batch_norm(*model, group);             // before DataParallel and the optimizer are made
//
// With several micro-batches per step each is still normalised by itself: see accumulation/batch_norm.h.

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include "snug/distributed/process_group.h"

namespace snug {

/// [N, C, ...] -> the same, of 2 to 5 dimensions; a BatchNorm2d to whatever looks for one. In training mode all ranks
/// must call it, equally often and in the same order, forward and backward; recomputed checkpoints send again. Each
/// rank's values count alike, however many it has: none at all is allowed ([0, C, ...]). Running statistics come out
/// the same on all ranks. Weight and bias get each rank's own share of the gradient, for DataParallel to add; so a loss
/// that is a mean over a rank's items wants equally many items on each, as it does without this layer. In evaluation
/// mode, and in a group of one, it is torch's batch normalisation, to the bit.
/// Statistics are gathered as mean, variance and count of each rank, and combined in FP64 (Chan, Golub & LeVeque 1979).
/// In FP32 gradients are as near to FP64 ones as those of one process; between the two it is rounding, 1e-6 of the
/// whole gradient's norm for a ResNet. In a tensor whose sum nearly cancels, such as a bias before another
/// normalisation, it is more: one process's own is off by more than that there.
class SyncBatchNormImpl : public torch::nn::BatchNorm2dImpl {
 public:
  SyncBatchNormImpl(torch::nn::BatchNormOptions options, std::shared_ptr<ProcessGroup> group);

  /// Throws ConfigError if all ranks together have fewer than two values per channel, and DistributedError if a rank is
  /// lost.
  torch::Tensor forward(const torch::Tensor& input);

  const ProcessGroup& group() const { return *group_; }

 protected:
  void _check_input_dim(const torch::Tensor& input) override;

 private:
  friend std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& module,
                                                          const std::shared_ptr<ProcessGroup>& group);
  std::shared_ptr<ProcessGroup> group_;
};
TORCH_MODULE(SyncBatchNorm);

namespace detail {
/// Those in it whose group has several ranks.
std::vector<const SyncBatchNormImpl*> sync_batch_norms(const torch::nn::Module& module);
}  // namespace detail

/// Puts a SyncBatchNorm in the place of every BatchNorm1d, 2d and 3d in `module` and returns their names. Options, mode
/// and parameters, the very tensors, stay, so an optimizer that holds them goes on; buffers share their memory with the
/// old layer's. What it reaches, and what it throws, is as with batch_norm_to_group_norm.
std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& module, const std::shared_ptr<ProcessGroup>& group);

}  // namespace snug
