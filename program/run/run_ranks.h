#pragma once
// RunRanks: the ranks of a training run, often just one.

#include <cstdint>
#include <memory>
#include <utility>

#include "snug/distributed/data_parallel.h"
#include "snug/distributed/process_group.h"

namespace snug::detail {

class RunRanks {
 public:
  /// `group`: null, or a group of one rank, for a run on one rank.
  explicit RunRanks(std::shared_ptr<ProcessGroup> group);

  int rank() const { return group_ ? group_->rank() : 0; }
  int local_rank() const { return group_ ? group_->local_rank() : 0; }
  int size() const { return group_ ? group_->size() : 1; }
  /// Whether this rank writes the files and reports.
  bool is_first() const { return rank() == 0; }

  /// Null on a single rank.
  const std::shared_ptr<ProcessGroup>& group() const { return group_; }
  /// Null on a single rank.
  template <class M>
  std::unique_ptr<DataParallel> data_parallel(M& model, const DataParallelOptions& options) const {
    return group_ ? std::make_unique<DataParallel>(model, group_, options) : nullptr;
  }
  double sum(double value) const;
  bool any(bool value) const;
  /// Throws ConfigError, on all ranks, if the ranks have loaded snapshots of different steps.
  void check_same_step(int64_t step) const;

 private:
  std::shared_ptr<ProcessGroup> group_;  // a group of several ranks
};

}  // namespace snug::detail
