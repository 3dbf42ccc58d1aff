#pragma once
// TapeReplays: the operators that an OpTape has recorded, and how the operators run again. tape_replays.cpp says how
// values come back, and how values are lost; tape_region.cpp says what runs again in a region.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>

#include "snug/checkpoint.h"
#include "snug/core.h"
#include "src/activations/operator_traits.h"
#include "src/memory/operator_mode.h"
#include "src/planner/profile.h"
#include "src/planner/replay.h"
#include "src/remat/tape_storages.h"

namespace snug::detail {

/// One operator of an OpTape, with everything needed to run the operator again.
struct TapeOperator {
  struct Operand {
    uint32_t argument;
    std::optional<uint32_t> element;  // position in a list argument
    plan::Value value;
    at::Tensor shape;  // has no memory
  };
  struct Result {
    uint32_t result;
    std::optional<uint32_t> element;
    int storage;
  };

  c10::OperatorHandle op;
  CallContext context;
  // Elements lie inside TapeOperator: most operators have few elements of each list, and a tape has many operators.
  c10::SmallVector<c10::IValue, 6> arguments;  // tensors removed
  c10::SmallVector<Operand, 3> operands;
  c10::SmallVector<Result, 3> results;     // only results on new storages
  c10::SmallVector<plan::Value, 3> needs;  // values read, and for each write the version before
  c10::SmallVector<plan::Value, 3> writes;
  bool is_replayable = true;
  bool is_safe = false;          // reads values of the graph, or draws: nobody writes the results through pointers
  at::Generator drew_from = {};  // the generator's state before the operator
};

/// An operator under way: the record, and facts that nobody asks for after the operator.
struct RunningOperator {
  TapeOperator record;
  const OperatorTraits& traits;
  size_t first_result;                                      // position on the stack
  c10::SmallVector<const c10::StorageImpl*, 1> given = {};  // arguments without a tensor, as for set_()
  bool reads_batch_statistics = false;
  std::vector<std::pair<int, const void*>> made = {};  // for the listener: new storages, with the addresses of bytes
  // In a region only (tape_region.cpp).
  bool is_in_graph = false;          // reads values of a tensor that requires a gradient, in gradient mode
  bool is_drawn = false;             // outside of the graph: draws, or computes from random values
  bool makes_blank = false;          // outside of the graph: reads no values and draws nothing
  Keep treatment = Keep::Recompute;  // of the results
};

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
  /// For memory that will be written: makes and keeps evicted storages that depend on the values.
  void keep_evicted_before_write(int storage);

  // Values that come back.
  c10::Storage rebuild(int storage);  // throws CannotRebuild
  void judge_all_again();
  void bring_back_what_is_kept();
  /// The number of operators that ran again.
  std::shared_ptr<const std::atomic<int64_t>> replayed() const { return replayed_; }

  /// Drops kept results that can be made again, the oldest first, until `bytes` bytes are released. Returns the number
  /// of released bytes.
  int64_t evict(int64_t bytes);

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
  bool can_run_again(int op, bool is_proven) const;
  bool secure(int storage);
  void forget_secured() {
    is_secured_.clear();
    is_insecure_.clear();
  }
  bool is_missing(int storage);
  std::vector<int> targets_with(int storage);
  void let_go_of_operands();

  TapeState& state_;
  TapeStorages& storages_;
  std::vector<TapeOperator> operators_;
  Replay* running_ = nullptr;
  // Answers of secure() until the next write: operators that can run again, and storages that cannot be made again.
  std::vector<bool> is_secured_;
  std::set<int> is_insecure_;
  plan::ReplayFinder replay_finder_;
  std::shared_ptr<std::atomic<int64_t>> replayed_ = std::make_shared<std::atomic<int64_t>>(0);
  // In a region only.
  int asking_pass_ = -2;          // the last pass that has asked
  int64_t replayed_in_pass_ = 0;  // operators
  std::vector<int> results_;      // storages of add_result()
};

}  // namespace snug::detail
