#pragma once
// Owners: the rank that keeps each parameter of a model in shards: the sum of the parameter's gradients, the
// optimizer's state, and, with weights in shards, the weights. Each group of shards has an owner of each parameter.
//
// Problem: gradients and weights must be divided as the optimizer's state is.
// Options: cut tensors, as ShardedOptimizer does alone, or keep tensors whole. Cut tensors divide evenly. Whole tensors
// keep a parameter's gradient a gradient of the parameter: loss scaling, clipping and the optimizer need no other code,
// and the norm of a gradient has the bits of one process.
// Choice: tensors stay whole. Parameters on one storage have the same owner.
// Consequence: a rank keeps at least the model's largest parameter, if the rank owns that parameter.

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>

#include "snug/distributed/data_parallel.h"

namespace snug::detail {

class Owners final {
 public:
  /// Divides `parameters` among the ranks of `group` by bytes: trained parameters evenly, and frozen parameters evenly.
  /// `group`: this rank's group of shards.
  Owners(const DataParallel::NamedTensors& parameters, std::shared_ptr<ProcessGroup> group);

  ProcessGroup& group() const { return *group_; }
  /// The rank of group() that keeps `parameter`; -1: each rank keeps the whole of it.
  int of(const at::Tensor& parameter) const {
    const auto found = owners_.find(parameter.unsafeGetTensorImpl());
    return found != owners_.end() ? found->second : -1;
  }

  /// Called on every rank before the ranks agree to write their parameters.
  std::function<void()> before_writing = {};
  /// Called on every rank when this rank has written its parameters. Returns when all ranks of group() have written
  /// theirs. Empty: the optimizer sends the parameters to all ranks of group().
  std::function<void()> written = {};

 private:
  std::shared_ptr<ProcessGroup> group_;
  std::unordered_map<const c10::TensorImpl*, int> owners_;
};

}  // namespace snug::detail
