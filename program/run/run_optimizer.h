#pragma once
// RunOptimizer: the optimizer of a training run; on several ranks in shares, if the run's settings say so.

#include <memory>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "program/run/config.h"
#include "snug/distributed/process_group.h"
#include "snug/distributed/sharded_optimizer.h"

namespace snug::detail {

class RunOptimizer {
 public:
  /// `group`: null for a run on one rank. `is_sharded`: each rank keeps a share of the state. The state is on the host
  /// if only the CPU can make the updates.
  RunOptimizer(const torch::nn::Module& model, const TrainConfig& config, const std::shared_ptr<ProcessGroup>& group,
               bool is_sharded);

  torch::optim::Optimizer& operator*() const { return *optimizer_; }
  torch::optim::Optimizer* operator->() const { return optimizer_.get(); }

  /// Null unless the state is in shares.
  ShardedOptimizer* sharded() const { return sharded_; }

  /// The bytes that this rank's first step allocates for the state.
  int64_t state_bytes_to_come() const;

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  ShardedOptimizer* sharded_ = nullptr;  // optimizer_, if in shares
};

}  // namespace snug::detail
