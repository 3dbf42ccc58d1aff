#pragma once
// OpTape: every operator of a forward pass with its operands, so that what it made can be made again, operator by
// operator, for any model.
//
// A value is a (storage, version): the operator that allocates a storage makes version 0, a write in place makes the
// next. Views share their storage and make nothing. Of what autograd saves, the tape keeps what its schedule says, and
// rebuilds the rest when backward asks: the producers of all that is missing run again, in program order, each once, on
// the operands that they had. Or it puts a storage away, to disk or host memory, when the last tensor on it is gone,
// when nobody can write to it any more. The rules are those at the top of planner/simulator.cpp, so that memory and
// time of a schedule are known before it runs.
//
// A backward pass inside the forward pass (forces from an energy, a penalty on gradients) is part of the latter. What
// it asks for is kept till autograd lets go of it, since nobody knows how long such a pass needs it; what it computes
// and saves itself is treated like the rest. Likewise what a pass inside the backward pass asks for that keeps its
// graph (a hook that solves an equation, as deep equilibrium models have).
//
// A write that no operator explains, as custom functions make through a pointer before they say mark_dirty, moves a
// tensor's count; what it wrote is not rebuilt. Nor is what operators read from memory that the program lends, as a
// batch from a loader's buffer (from_blob): its owner may fill it anew, or take it back.
//
// Its parts: TapeOperator and TapeStorage are what it has recorded, Holding says where the bytes of a storage are, and
// ScheduleCursor how far the step has followed its schedule.
//
// Without a schedule the tape keeps everything that autograd saves, or nothing (drop_everything). With one, it stays
// right where the operators turn out to be others than those that were scheduled: from the first that differs on, it
// keeps everything. Before one of them writes to what dropped results were made of, those are rebuilt and kept.

#include <any>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/flat_hash_map.h>

#include "snug/core.h"
#include "snug/profile.h"
#include "src/activations/offload_store.h"
#include "src/memory/operator_mode.h"
#include "src/memory/saved_tensor_policy.h"
#include "src/planner/replay.h"
#include "src/remat/schedule_cursor.h"
#include "src/remat/tape_listener.h"
#include "src/remat/tape_operator.h"
#include "src/remat/tape_schedule.h"
#include "src/remat/tape_shapes.h"
#include "src/remat/tape_storage.h"

namespace snug::detail {

/// What backward asks for is gone, and so is something that it was made of.
class CannotRebuild : public Error {
 public:
  using Error::Error;
};

/// Thread-safe, but for the forward pass, which is on one thread. Memory that is watched may come back from another
/// meanwhile, as from that of a SaveOnHost inside, which drops what it has written.
class OpTape final : public OperatorPolicy, public std::enable_shared_from_this<OpTape> {
 public:
  /// `listener`, if there is one, must live until forget_listener().
  explicit OpTape(std::shared_ptr<const TapeSchedule> schedule, TapeListener* listener = nullptr);

  void call(const OperatorCall& call, Stack& stack) override;
  void unseen_write(const at::Tensor& tensor) override;
  void was_switched_off() override;
  std::any pack(const at::Tensor& tensor);
  at::Tensor unpack(std::any& packed);
  bool gives_away(std::any& packed, const at::Tensor& unpacked);
  /// The forward pass is over. Unpacking does this too, unless it belongs to a backward pass inside the forward pass,
  /// which the schedule knows of or a listener is to hear of.
  void close();
  /// Tells the listener of what autograd still has then.
  void backward_is_over();
  void forget_listener();
  /// From now on holds only what cannot be rebuilt, or puts that into `store`. Without a schedule only; for a forward
  /// pass without backward.
  void drop_everything(std::shared_ptr<OffloadStore> store) {
    drops_everything_ = true;
    store_ = std::move(store);
  }

  /// Memory that its operators made and that somebody has.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made_and_alive() const;
  /// Whether a backward pass inside the forward pass has asked for it.
  bool is_asked_inside(int storage) const { return storages_[static_cast<size_t>(storage)].is_asked_inside; }
  /// The first operator that was another than the schedule's, in words; empty if there was none.
  const std::string& deviation() const { return cursor_.deviation(); }
  /// The first operator whose results were larger than scheduled. The schedule goes on.
  const std::string& growth() const { return growth_; }
  /// Whether operators went unseen because somebody switched the operator mode off within the scope.
  bool missed_operators() const { return missed_operators_; }
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
  using Memories = c10::SmallVector<const c10::StorageImpl*, 1>;
  TapeStorage& at(int storage) { return storages_[static_cast<size_t>(storage)]; }
  std::optional<int> known_number_of(const at::Tensor& tensor) const;
  int number_of(const at::Tensor& tensor);
  int add_storage(const at::Tensor& tensor, int producer);  // -1: none of the operators
  TapeOperator read_arguments(const OperatorCall& call, Stack& stack);
  void read_tensor(TapeOperator& record, const at::Tensor& tensor, size_t argument, std::optional<size_t> element);
  void note_write(TapeOperator& record, const at::Tensor& tensor);
  void expect_writes(const std::vector<at::Tensor>& written);
  WriteCount& count_of(int storage, const at::Tensor& tensor);
  void note_write_through_pointer(int storage, const at::Tensor& tensor);
  void note_unseen_write(int storage);
  void note_alias(int storage, const at::Tensor& tensor, bool was_written);
  static const c10::DataPtr& allocated(const c10::DataPtr& memory);
  static bool is_from_allocator(const c10::DataPtr& memory);
  static bool is_lent(const at::Tensor& tensor);
  void trust(const at::Tensor& tensor);
  void take_back_writes(const TapeOperator& record);
  std::vector<std::pair<int, const void*>> read_results(TapeOperator& record, const Memories& given, const Stack& stack,
                                                        size_t first_result);
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

  // Streams of a device.
  void begin_streams(int storage, const c10::Storage& memory);
  void add_stream(int storage, const c10::Storage& memory, const c10::Stream& stream);
  void note_streams(const TapeOperator& record, int named);
  void meet_stream(int storage, const c10::Storage& memory);
  c10::Stream gather_streams(int storage);

  // Holding and rebuilding.
  bool is_kept(int storage) const;
  bool should_hold(int storage);
  bool goes_away(int storage) const;
  void put_away(int storage);
  std::unique_ptr<StoredAway> send(int storage, const c10::Storage& memory, bool waits);
  void wait_for_oldest_stream();
  void wait_for_stream(int storage);
  void meet_streams_before(size_t op);
  void meet_streams_of_unpacking();
  void settle(int storage);
  c10::Storage find(int storage);
  c10::Storage bring(int storage);
  c10::Storage load(int storage);
  c10::Storage rebuild(int storage);
  static void poison(const c10::Storage& memory);
  // Tells the listener that the memory which `work` takes is a replay's.
  template <class Work>
  void as_replay(const Work& work) {
    if (listener_ != nullptr) {
      listener_->before_replay();
    }
    work();
    if (listener_ != nullptr) {
      listener_->after_replay();
    }
  }
  void judge_all_again();
  void bring_back_what_is_kept();
  void note_place(int storage, const c10::Storage& memory);
  bool note_ask_inside(int storage);
  at::Tensor values_of(const Slot& slot);
  void begin_unpacking(Slot& slot);
  void let_go();
  bool stays_after_replay(int storage) const;
  void slot_is_gone(Slot& slot);

  ScheduleCursor cursor_;
  std::string growth_;
  std::shared_ptr<OffloadStore> store_;  // outlives what it has stored
  TapeListener* listener_;
  std::vector<TapeStorage> storages_;
  std::vector<TapeOperator> operators_;
  ska::flat_hash_map<const c10::StorageImpl*, int> numbers_;
  TapeShapes shapes_;
  std::deque<int> leaving_;  // streams on their way out, the oldest first
  bool has_unpacked_ = false;
  bool missed_operators_ = false;
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
  bool gives_away(std::any& packed, const at::Tensor& unpacked) override { return tape_->gives_away(packed, unpacked); }

 private:
  std::shared_ptr<OpTape> tape_;
};

}  // namespace snug::detail
