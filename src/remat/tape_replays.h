#pragma once
// TapeReplays: the operators that an OpTape has recorded, and how the operators run again. tape_replays.cpp says how
// values come back, and how values are lost; tape_region.cpp says what runs again in a region.

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "snug/core.h"
#include "src/planner/replay.h"
#include "src/remat/tape_operator.h"
#include "src/remat/tape_state.h"
#include "src/remat/tape_storages.h"

namespace snug::detail {

/// Backward asked for a storage that is gone, and a value needed to rebuild the storage is gone too.
class CannotRebuild : public Error {
 public:
  using Error::Error;
};

class TapeReplays {
 public:
  TapeReplays(TapeState& state, TapeStorages& storages);

  /// The number of the operator that comes next.
  int next() const { return static_cast<int>(operators_.size()); }
  const TapeOperator& at(int op) const { return operators_[static_cast<size_t>(op)]; }
  void judge(const RunningOperator& running);
  void add(TapeOperator&& op) { operators_.push_back(std::move(op)); }

  // Values that are lost.
  void note_write_through_pointer(int storage, const at::Tensor& tensor);
  void note_unseen_write(int storage);
  void note_all_unseen_writes();
  void keep_what_depends_on(const std::set<int>& lost);

  // Values that come back.
  /// Throws CannotRebuild.
  c10::Storage rebuild(int storage);
  void judge_all_again();
  void bring_back_what_is_kept();
  /// The number of operators that ran again.
  std::shared_ptr<const std::atomic<int64_t>> replayed() const { return replayed_; }

  // Regions.
  /// Backward will ask for the storage through OpTape::look_at().
  void add_result(int storage) { results_.push_back(storage); }
  void forget_what_is_unneeded();
  void begin_asking();
  void note_asked(int storage);

 private:
  class Replay;

  void judge_in_region(const RunningOperator& running, int storage);
  bool stays_after_replay(int storage) const;
  bool is_missing(int storage);
  std::vector<int> targets_with(int storage);
  void let_go_of_operands();

  TapeState& state_;
  TapeStorages& storages_;
  std::vector<TapeOperator> operators_;
  plan::ReplayFinder replay_finder_;
  std::shared_ptr<std::atomic<int64_t>> replayed_ = std::make_shared<std::atomic<int64_t>>(0);
  // In a region only.
  int asking_pass_ = -2;          // the last pass that has asked
  int64_t replayed_in_pass_ = 0;  // operators
  std::vector<int> results_;      // storages of add_result()
};

}  // namespace snug::detail
