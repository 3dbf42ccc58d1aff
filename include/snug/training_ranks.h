#pragma once
// The interfaces between a Stepper and the other ranks of a job, for snug's own use. The classes that implement the
// interfaces are in the target snug::distributed: DataParallel and SyncBatchNorm.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {
class ProcessGroup;
}

namespace snug::detail {

class StepRanks;

/// The ranks that train a model together: see DataParallel.
class TrainingRanks {
 public:
  virtual ~TrainingRanks() = default;
  /// For a Stepper of a model with the parameters `of_model`. Throws ConfigError if the ranks train another model,
  /// without these parameters.
  virtual std::unique_ptr<StepRanks> step_ranks(const std::vector<at::Tensor>& of_model) = 0;
};

/// A module in whose forward() the ranks wait for each other: see SyncBatchNorm.
class SendsInForward {
 public:
  virtual ~SendsInForward() = default;
  /// The group over which forward() sends in training mode. Null if the group has a single rank.
  virtual const ProcessGroup* sends_over() const = 0;
};

}  // namespace snug::detail
