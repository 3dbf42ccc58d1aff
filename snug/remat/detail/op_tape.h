#pragma once
// OpTape: every operator of a forward pass with its operands, so that what it made can be made again, operator by operator, for any model.
//
// A value is a (storage, version): the operator that allocates a storage makes version 0, a write in place makes the next. Views share their
// storage and make nothing. Of what autograd saves, the tape keeps what its schedule says, and rebuilds the rest when backward asks: the
// producers of all that is missing run again, in program order, each once, on the operands that they had. Or it puts a storage away, to disk or
// host memory, when the last tensor on it is gone, when nobody can write to it any more. The rules are those at the top
// of planner/simulator.cpp, so that memory and time of a schedule are known before it runs.
//
// A backward pass inside the forward pass (forces from an energy, a penalty on gradients) is part of the latter. What it asks for is kept till
// autograd lets go of it, since nobody knows how long such a pass needs it; what it computes and saves itself is treated like the rest.
//
// A write that no operator explains, as custom functions make through a pointer before they say mark_dirty, moves a tensor's count; what it
// wrote is not rebuilt. Nor is what operators read from memory that the program lends, as a batch from a loader's buffer (from_blob): its owner
// may fill it anew, or take it back.
//
// Without a schedule the tape keeps everything that autograd saves, or nothing (drop_everything). With one, it stays right where the operators
// turn out to be others than those that were scheduled: from the first that differs on, it keeps everything. Before one of them writes to
// what dropped results were made of, those are rebuilt and kept.

#include <any>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "snug/activations/detail/offload_store.h"
#include "snug/core/error.h"
#include "snug/memory/detail/held.h"
#include "snug/memory/detail/operator_mode.h"
#include "snug/memory/detail/saved_tensor_policy.h"
#include "snug/planner/detail/replay.h"
#include "snug/planner/profile.h"
#include "snug/remat/detail/schedule_cursor.h"
#include "snug/remat/detail/tape_schedule.h"

namespace snug::detail {

/// What backward asks for is gone, and so is something that it was made of.
class CannotRebuild : public Error {
 public:
  using Error::Error;
};

/// Told of what happens on a tape; see TapeRecorder.
class TapeListener {
 public:
  virtual ~TapeListener() = default;
  virtual void on_storage(int storage, int64_t bytes, bool is_external) = 0;
  virtual void before_operator() = 0;
  /// `made`: storages whose version 0 is among the writes.
  virtual void after_operator(ProfiledOperator&& op, const std::vector<std::pair<int, const void*>>& made) = 0;
  /// It made and wrote nothing.
  virtual void after_view() = 0;
  virtual void on_drop(int storage) = 0;
  /// An operator gave it other memory, which is not among what was `made`. It will never be rebuilt.
  virtual void on_resized(int storage) = 0;
  virtual void on_unpack(int storage) = 0;
  virtual void after_unpack() = 0;
  virtual void on_done(int storage) = 0;
  /// Autograd saves a tensor on it.
  virtual void on_pack(int storage) = 0;
  /// A saved tensor on it was released and not asked for by the backward pass; or the program has let go of what a backward pass inside the forward
  /// pass had from there.
  virtual void on_unused(int storage) = 0;
  virtual void before_replay() = 0;
  virtual void after_replay() = 0;
  /// Something outside of the tape was written, or is about to be, for the first time.
  virtual void before_outside_write(const at::Tensor& tensor) = 0;
};

struct TapeStorage {
  bool is_external = true;
  bool is_lent = false;         // from outside, by an owner who may fill it anew or take it back
  bool is_counted = true;       // its memory is the allocator's
  bool is_pinned = false;       // is not rebuilt, whatever the operators say
  bool is_rebuildable = true;   // at its last version, by operators that are on the tape
  bool claimed = false;         // the schedule wants it to stay
  bool is_watched = false;      // its memory comes back to the tape by itself; with a listener, or to be put away
  bool is_asked_early = false;  // by a backward pass inside the forward pass
  bool was_dropped = false;     // by the program, if it is watched
  int slots = 0;                // tensors on it that autograd has saved and not released
  int uses = 0;                 // of those, how many backward has asked for
  std::vector<int> producers;   // per version: the operator; -1: not on the tape
  int64_t bytes = 0;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> where = {};  // its last version, if anybody holds it
  c10::Storage held = {};                                               // by the tape
  c10::DataPtr parked = {};                     // likewise, after the program has dropped it, if it was watched
  std::unique_ptr<StoredAway> away = {};        // what it held when the program dropped it
  c10::SmallVector<WriteCount, 1> counts = {};  // of the tensors it was seen in, one for each counter

  int last_version() const { return static_cast<int>(producers.size()) - 1; }
  bool was_written_unseen() const;
  int64_t counted_bytes() const { return is_counted ? bytes : 0; }
};

struct TapeOperator {
  struct Operand {
    size_t argument;
    std::optional<size_t> element;  // of a list
    ValueId value;
    at::Tensor shape;  // without memory
  };
  struct Result {
    size_t result;
    std::optional<size_t> element;
    int storage;
  };

  c10::OperatorHandle op;
  CallContext context;
  std::vector<c10::IValue> arguments;  // without their tensors
  std::vector<Operand> operands;
  std::vector<Result> results;  // those that are new storages
  std::vector<ValueId> needs;   // what it read, and the version before of what it wrote
  std::vector<ValueId> writes;
  bool is_replayable = true;
  at::Generator drew_from = {};  // as it was
};

/// Thread-safe, but for the forward pass, which is on one thread. Memory that is watched may come back from another meanwhile, as from that
/// of a SaveOnHost inside, which drops what it has written.
class OpTape final : public OperatorPolicy, public std::enable_shared_from_this<OpTape> {
 public:
  /// `listener`, if there is one, must live until forget_listener().
  explicit OpTape(std::shared_ptr<const TapeSchedule> schedule, TapeListener* listener = nullptr);

  void call(const OperatorCall& call, Stack& stack) override;
  void unseen_write(const at::Tensor& tensor) override;
  std::any pack(const at::Tensor& tensor);
  at::Tensor unpack(std::any& packed);
  /// The forward pass is over. Unpacking does this too, unless it belongs to a backward pass inside the forward pass, which the schedule knows of or
  /// a listener is to hear of.
  void close();
  void forget_listener();
  /// From now on holds only what cannot be rebuilt, or puts that into `store`. Without a schedule only; for a forward pass without backward.
  void drop_everything(std::shared_ptr<OffloadStore> store) {
    drops_everything_ = true;
    store_ = std::move(store);
  }

  /// Whether a backward pass inside the forward pass has asked for it.
  bool is_asked_early(int storage) const { return storages_[static_cast<size_t>(storage)].is_asked_early; }
  /// The first operator that was another than the schedule's, in words; empty if there was none.
  const std::string& deviation() const { return cursor_.deviation(); }
  /// Operators that ran again.
  std::shared_ptr<const std::atomic<int64_t>> replayed() const { return replayed_; }
  /// From now on compares what is rebuilt with what was saved, bit for bit, and remembers storages that differ.
  void verify_values() { verifies_ = true; }
  const std::set<int>& different() const { return different_; }

 private:
  struct Slot;
  struct Watch;
  class Replay;

  // Recording.
  TapeStorage& at(int storage) { return storages_[static_cast<size_t>(storage)]; }
  int number_of(const at::Tensor& tensor);
  int add_storage(const at::Tensor& tensor, bool is_external, int producer);
  TapeOperator read_arguments(const OperatorCall& call, Stack& stack);
  void read_tensor(TapeOperator& record, const at::Tensor& tensor, size_t argument, std::optional<size_t> element);
  void note_write(TapeOperator& record, const at::Tensor& tensor);
  void expect_writes(const std::vector<at::Tensor>& written);
  WriteCount& count_of(int storage, const at::Tensor& tensor);
  void note_write_through_pointer(int storage, const at::Tensor& tensor);
  void note_unseen_write(int storage);
  void note_alias(int storage, const at::Tensor& tensor, bool was_written);
  static bool is_from_allocator(const c10::DataPtr& memory);
  static bool is_lent(const at::Tensor& tensor);
  void trust(const at::Tensor& tensor);
  void take_back_writes(const TapeOperator& record);
  std::vector<std::pair<int, const void*>> read_results(TapeOperator& record, const Stack& stack, size_t first_result);
  void follow_schedule(const TapeOperator& record);
  void save_from_write(const TapeOperator& record, const std::vector<at::Tensor>& written,
                       const std::vector<at::Tensor>& statistics);
  void keep_what_depends_on(const std::set<int>& lost);
  void judge(const TapeOperator& record);
  void hash_what_was_filled();
  void tell(const TapeOperator& record, const std::vector<std::pair<int, const void*>>& made);
  void watch(int storage, c10::StorageImpl& impl);
  void dropped(int storage, c10::DataPtr data);
  bool is_workspace_of(int storage, const at::Tensor& tensor) const;

  // Holding and rebuilding.
  bool is_kept(int storage) const;
  bool should_hold(int storage);
  bool goes_away(int storage) const;
  void put_away(int storage);
  void settle(int storage);
  c10::Storage find(int storage);
  c10::Storage bring(int storage);
  c10::Storage load(int storage);
  c10::Storage rebuild(int storage);
  void note_place(int storage, const c10::Storage& memory);
  bool note_early_ask(int storage);
  at::Tensor values_of(const Slot& slot);
  void begin_unpacking(Slot& slot);
  void let_go();
  bool stays_after_replay(int storage) const;
  void slot_is_gone(Slot& slot);

  ScheduleCursor cursor_;
  std::shared_ptr<OffloadStore> store_;  // outlives what it has stored
  TapeListener* listener_;
  std::vector<TapeStorage> storages_;
  std::vector<TapeOperator> operators_;
  ska::flat_hash_map<const c10::StorageImpl*, int> numbers_;
  bool is_closed_ = false;
  bool keeps_graph_ = false;
  bool drops_everything_ = false;
  ReplayFinder replay_finder_;
  std::shared_ptr<std::atomic<int64_t>> replayed_ = std::make_shared<std::atomic<int64_t>>(0);
  bool verifies_ = false;
  std::vector<std::weak_ptr<Slot>> packed_;  // since the last operator, to verify
  std::set<int> different_;
  mutable std::recursive_mutex mutex_;  // not held while an operator of the program runs
};

/// Hands what autograd saves to a tape.
class TapePolicy final : public SavedTensorPolicy {
 public:
  explicit TapePolicy(std::shared_ptr<OpTape> tape) : tape_(std::move(tape)) {}
  std::any pack(const at::Tensor& tensor) override { return tape_->pack(tensor); }
  at::Tensor unpack(std::any& packed) override { return tape_->unpack(packed); }

 private:
  std::shared_ptr<OpTape> tape_;
};

}  // namespace snug::detail
