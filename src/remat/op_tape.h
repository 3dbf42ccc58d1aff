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
//   everything saved by autograd, or nothing (drop_everything), or serves a checkpointed region (tape_region.cpp).
// - With a schedule, results stay right where operators differ from the schedule. From the first different operator on,
//   the tape keeps everything. Before a different operator writes to the inputs of dropped results, the tape rebuilds
//   and keeps the dropped results.
// - With a schedule, an allocation that finds no room has kept results evicted (TapeReplays::evict). So a step that
//   needs more memory than its plan stays within the limit, and has the same bits.
//
// Parts, each of which uses only the parts below:
// - OpTape answers operators and autograd, locks the mutex, and has a Slot for each saved tensor (op_tape_saved.cpp);
// - TapeWriter makes a TapeOperator of each operator, and compares the operator with the schedule;
// - TapeReplays keeps each TapeOperator, judges which values can be made again, and runs operators again;
// - TapeStorages keeps a TapeStorage for each storage, and decides which of program, tape and store owns the storage;
// - TapeState has what all parts know: the region or the ScheduleCursor, the listener, and how far the step is.

#include <any>
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "src/activations/tensor_hash.h"
#include "src/memory/evictable.h"
#include "src/memory/operator_mode.h"
#include "src/memory/saved_tensor_policy.h"
#include "src/remat/tape_replays.h"
#include "src/remat/tape_storages.h"
#include "src/remat/tape_writer.h"

namespace snug::detail {

/// Thread-safe, except for the forward pass, which runs on one thread. During the forward pass, watched memory may come
/// back on another thread: the thread of a SaveOnHost inside drops memory after writing.
class OpTape final : public OperatorPolicy,
                     public SavedTensorPolicy,
                     public Evictable,
                     public std::enable_shared_from_this<OpTape> {
 public:
  /// `listener` may be null. Otherwise the listener must live until forget_listener().
  explicit OpTape(std::shared_ptr<const TapeSchedule> schedule, TapeListener* listener = nullptr);
  /// A tape that drops all results of a region, but for the results that the region's policy keeps.
  explicit OpTape(TapeRegion region);

  void call(const OperatorCall& call, Stack& stack) override;
  void unseen_write(const at::Tensor& tensor) override;
  void before_unseen_write(const at::Tensor& tensor) override;
  void was_switched_off() override;
  std::any pack(const at::Tensor& tensor) override;
  at::Tensor unpack(std::any& packed) override;
  bool gives_away(std::any& packed, const at::Tensor& unpacked) override;
  /// In a region: packs a tensor like pack(). Backward's first request makes the tensor's values, too.
  std::any pack_result(const at::Tensor& tensor);
  /// With a schedule: makes room for an allocation, beyond the schedule.
  int64_t evict(int64_t bytes) override;
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
  void drop_everything(std::shared_ptr<OffloadStore> store) { storages_->drop_everything(std::move(store)); }

  /// Storages that operators of the tape made and that still have an owner.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made_and_alive() const;
  /// Whether a backward pass inside the forward pass, or inside another backward pass, has asked for the storage.
  bool is_asked_inside(int storage) const { return storages_->at(storage).is_asked_inside; }
  /// Describes the first operator that differed from the schedule; empty: none so far.
  const std::string& deviation() const { return state_->cursor.deviation(); }
  /// Describes the first operator with larger results than scheduled; empty: none so far. Larger results do not end the
  /// schedule.
  const std::string& growth() const { return writer_.growth(); }
  /// Whether operators went unseen because somebody switched the operator mode off within the scope.
  bool missed_operators() const { return missed_operators_; }
  /// The number of operators that ran again.
  std::shared_ptr<const std::atomic<int64_t>> replayed() const { return replays_.replayed(); }
  /// From now on, rebuilt values are compared bit for bit with the saved values, and different() lists the storages
  /// that differ. Call different() after the backward pass: different() waits for the device.
  void verify_values() { state_->verifies = true; }
  const std::set<int>& different();

 private:
  struct Slot;
  struct Comparison {
    int storage;
    size_t saved, rebuilt;  // numbers of hashes
  };

  explicit OpTape(std::shared_ptr<TapeState> state);

  size_t hash(const at::Tensor& tensor);
  void hash_what_was_filled();
  bool note_ask_inside(int storage);
  void begin_unpacking(Slot& slot, int pass);
  at::Tensor values_of(const Slot& slot);
  void let_go();
  void slot_is_gone(Slot& slot);

  const std::shared_ptr<TapeState> state_;
  const std::shared_ptr<TapeStorages> storages_;
  TapeReplays replays_;
  TapeWriter writer_;
  bool missed_operators_ = false;
  TensorHashes hashes_;
  std::vector<Comparison> comparisons_;
  std::vector<Slot*> packed_;  // slots packed since the last operator, for verification
  std::set<int> different_;
  std::set<int> written_in_backward_;
};

}  // namespace snug::detail
