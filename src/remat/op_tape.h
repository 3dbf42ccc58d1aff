#pragma once
// OpTape: every operator of a forward pass with the operator's operands. From an OpTape, dropped results are made
// again, operator by operator, for any model.
//
// Problem: backward needs the tensors that autograd saves, and a plan has memory for only some of the tensors. The
// other tensors must come back with the same bits, from a model that was written without plans in mind.
//
// Options: a function of the program runs again, as under PyTorch's checkpoint. The function runs as a whole, repeats
// its effects, and may compute other values. Or recorded operators run again. Operators need no cuts in the model, and
// only missing results cost time.
//
// Choice: operators. A value is a (storage, version). The operator that allocates a storage makes version 0; each write
// in place makes the next version. Views share a storage and make nothing. Of the tensors saved by autograd, the tape
// keeps the storages named by the schedule. When backward asks for another storage, the producers of all missing values
// run again: in program order, each producer once, on the same operands as before. A schedule can also put a storage
// away, to disk or host memory. The storage leaves when the last tensor on the storage is gone, because nobody can
// write to the storage any more.
//
// Consequences:
// - The tape follows the rules at the top of planner/simulator.cpp, so memory and time of a schedule are predicted
//   before the schedule runs.
// - A backward pass inside the forward pass (forces from an energy, a penalty on gradients) is part of the forward
//   pass. Nobody can tell how long the inner pass needs a storage. So the tape keeps every storage requested by the
//   inner pass until autograd releases the storage. Results and saved tensors of the inner pass itself have no special
//   rule.
// - The same rule covers a pass inside the backward pass, if the inner pass keeps the graph (a hook that solves an
//   equation, as in deep equilibrium models).
// - Custom functions write through a pointer before calling mark_dirty. A write that no operator explains moves the
//   tensor's write count, and the written values are not rebuilt.
// - An operator that read memory lent by the program, as a batch in a loader's buffer (from_blob), does not run again:
//   the owner may fill the memory again, or take the memory back.
// - This is the only code that recomputes. With a schedule, the tape serves a plan. Without a schedule, the tape keeps
//   everything saved by autograd, or nothing (drop_everything), or serves a checkpointed region (op_tape_region.cpp).
// - With a schedule, results stay right where operators differ from the schedule. From the first different operator on,
//   the tape keeps everything. Before a different operator writes to the inputs of dropped results, the tape rebuilds
//   and keeps the dropped results.
//
// Parts: TapeOperator and TapeStorage are the records, Holding says where a storage's bytes are, and ScheduleCursor
// says how far the step has followed the schedule.

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
#include "src/activations/offload_store.h"
#include "src/activations/operator_traits.h"
#include "src/memory/operator_mode.h"
#include "src/memory/saved_tensor_policy.h"
#include "src/planner/replay.h"
#include "src/remat/schedule_cursor.h"
#include "src/remat/tape_listener.h"
#include "src/remat/tape_operator.h"
#include "src/remat/tape_region.h"
#include "src/remat/tape_schedule.h"
#include "src/remat/tape_shapes.h"
#include "src/remat/tape_storage.h"

namespace snug::detail {

/// Backward asked for a storage that is gone, and a value needed to rebuild the storage is gone too.
class CannotRebuild : public Error {
 public:
  using Error::Error;
};

/// Thread-safe, except for the forward pass, which runs on one thread. During the forward pass, watched memory may come
/// back on another thread: the thread of a SaveOnHost inside drops memory after writing.
class OpTape final : public OperatorPolicy, public std::enable_shared_from_this<OpTape> {
 public:
  /// `listener` may be null. Otherwise the listener must live until forget_listener().
  explicit OpTape(std::shared_ptr<const TapeSchedule> schedule, TapeListener* listener = nullptr);
  /// A tape that drops all results of a region, but for the results that the region's policy keeps.
  explicit OpTape(TapeRegion region);

  void call(const OperatorCall& call, Stack& stack) override;
  void unseen_write(const at::Tensor& tensor) override;
  void before_unseen_write(const at::Tensor& tensor) override;
  void was_switched_off() override;
  std::any pack(const at::Tensor& tensor);
  at::Tensor unpack(std::any& packed);
  bool gives_away(std::any& packed, const at::Tensor& unpacked);
  /// In a region: packs a tensor like pack(). Backward's first request makes the tensor's values, too.
  std::any pack_result(const at::Tensor& tensor);
  /// The values of a tensor packed by pack_result().
  at::Tensor look_at(std::any& packed);
  /// In a region: `tensor` comes from outside, and backward gets the tensor from `policy`. Call before the first
  /// operator.
  void keep_outside(const at::Tensor& tensor, const std::shared_ptr<SavedTensorPolicy>& policy);
  /// Ends the forward pass. Unpacking ends the forward pass as well, except for a request from a backward pass inside
  /// the forward pass, if the schedule has the inner pass or a listener must hear of the inner pass.
  void close();
  /// Reports to the listener every storage that autograd still has.
  void backward_is_over();
  /// Notes the storages from before the forward pass with writes that no operator of the tape explains, as by a hook of
  /// the backward pass. The numbers are of this tape.
  void note_writes_in_backward();
  const std::set<int>& written_in_backward() const { return written_in_backward_; }
  void forget_listener();
  /// From now on, holds only storages that cannot be rebuilt, or puts the storages into `store` if `store` is not null.
  /// Only without a schedule, for a forward pass without backward.
  void drop_everything(std::shared_ptr<OffloadStore> store) {
    drops_everything_ = true;
    store_ = std::move(store);
  }

  /// Storages that operators of the tape made and that still have an owner.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made_and_alive() const;
  /// Whether a backward pass inside the forward pass, or inside another backward pass, has asked for the storage.
  bool is_asked_inside(int storage) const { return storages_[static_cast<size_t>(storage)].is_asked_inside; }
  /// Describes the first operator that differed from the schedule; empty: none so far.
  const std::string& deviation() const { return cursor_.deviation(); }
  /// Describes the first operator with larger results than scheduled; empty: none so far. Larger results do not end the
  /// schedule.
  const std::string& growth() const { return growth_; }
  /// Whether operators went unseen because somebody switched the operator mode off within the scope.
  bool missed_operators() const { return missed_operators_; }
  /// The number of operators that ran again.
  std::shared_ptr<const std::atomic<int64_t>> replayed() const { return replayed_; }
  /// From now on, rebuilt values are compared bit for bit with the saved values, and different() lists the storages
  /// that differ.
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
  int add_storage(const at::Tensor& tensor, int producer);  // producer -1: no operator of the tape
  TapeOperator read_arguments(const OperatorCall& call, Stack& stack);
  void read_tensor(TapeOperator& record, const at::Tensor& tensor, size_t argument, std::optional<size_t> element);
  void note_write(TapeOperator& record, const at::Tensor& tensor);
  void expect_writes(const std::vector<at::Tensor>& written);
  WriteCount& count_of(int storage, const at::Tensor& tensor);
  void note_write_through_pointer(int storage, const at::Tensor& tensor);
  void note_unseen_write(int storage);
  void note_all_unseen_writes();
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

  // Regions.
  void prepare_operands(TapeOperator& record, const OperatorTraits& traits, const Arguments& arguments);
  void treat_result(const TapeOperator& record, int storage);
  void judge_in_region(const TapeOperator& record, int storage);
  void pack_outside(int storage, const at::Tensor& tensor);
  c10::Storage from_outside(int storage);
  void copy_before_write(const at::Tensor& tensor);
  void hold_memory_itself(int storage);
  void save_from_write_in_region(const std::vector<at::Tensor>& written);
  void forget_what_is_unneeded();
  void begin_asking();
  void note_asked(int storage);
  bool is_missing(int storage);
  std::vector<int> targets_with(int storage);
  void let_go_of_operands();
  std::string name() const { return region_ ? region_->name : "Rematerialize"; }

  // Streams of a device.
  void begin_streams(int storage, const c10::Storage& memory);
  void add_stream(int storage, const c10::Storage& memory, const c10::Stream& stream);
  void note_streams(const TapeOperator& record, int named);
  void meet_stream(int storage, const c10::Storage& memory);
  c10::Stream gather_streams(int storage);

  // Holding and rebuilding.
  bool is_kept(int storage) const;
  bool has_value(plan::Value value) const;
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
  // Tells the listener that memory allocated by `work` belongs to a replay.
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
  std::optional<TapeRegion> region_;
  std::shared_ptr<OffloadStore> store_;  // outlives the stored copies
  TapeListener* listener_;
  std::vector<TapeStorage> storages_;
  std::vector<TapeOperator> operators_;
  ska::flat_hash_map<const c10::StorageImpl*, int> numbers_;
  TapeShapes shapes_;
  std::deque<int> leaving_;       // streamed storages that are being written, the oldest first
  int asking_pass_ = -2;          // in a region: the last pass that has asked
  int64_t replayed_in_pass_ = 0;  // operators
  std::vector<int> results_;      // storages of pack_result()
  bool has_unpacked_ = false;
  bool missed_operators_ = false;
  bool is_closed_ = false;
  bool keeps_graph_ = false;
  bool drops_everything_ = false;
  plan::ReplayFinder replay_finder_;
  std::shared_ptr<std::atomic<int64_t>> replayed_ = std::make_shared<std::atomic<int64_t>>(0);
  bool verifies_ = false;
  std::vector<std::weak_ptr<Slot>> packed_;  // slots packed since the last operator, for verification
  std::set<int> different_;
  std::set<int> written_in_backward_;
  mutable std::recursive_mutex mutex_;  // unlocked while an operator of the program runs
};

/// Passes the tensors saved by autograd to a tape.
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
