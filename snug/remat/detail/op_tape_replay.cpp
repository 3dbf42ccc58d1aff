#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include "snug/activations/detail/storage_views.h"
#include "snug/activations/detail/tensor_hash.h"
#include "snug/core/error.h"
#include "snug/remat/detail/op_tape.h"
#include "snug/remat/detail/tape_slot.h"

// Holding and rebuilding: the rules at the top of planner/simulator.cpp.

namespace snug::detail {
// --- what the tape holds

// A pass that keeps its graph lets go of what it needs no more, too, if that can come again.
bool OpTape::is_kept(int storage) const {
  const TapeStorage& s = storages_[static_cast<size_t>(storage)];
  const TapeSchedule::ForStorage* scheduled = cursor_.of(storage);
  const bool is_dropped = scheduled != nullptr
                              ? !scheduled->keep_if_saved || (keeps_graph_ && cursor_.is_let_go(*scheduled))
                              : drops_everything_ && !s.is_asked_early;
  return !is_dropped || (!s.is_rebuildable && !goes_away(storage));
}

// Whether it is put away when nobody holds it, because it is needed later.
bool OpTape::goes_away(int storage) const {
  const TapeStorage& s = storages_[static_cast<size_t>(storage)];
  const TapeSchedule::ForStorage* scheduled = store_ ? cursor_.of(storage) : nullptr;
  if (scheduled == nullptr) {
    return drops_everything_ && store_ != nullptr && !s.is_external && !s.is_rebuildable;
  }
  return scheduled->is_offloaded && (cursor_.is_needed_later(*scheduled) || keeps_graph_);
}

bool OpTape::should_hold(int storage) {
  const TapeStorage& s = at(storage);
  return (s.is_external && !s.is_lent) || s.claimed || s.uses > 0 || (s.slots > 0 && is_kept(storage));
}

void OpTape::settle(int storage) {
  TapeStorage& s = at(storage);
  if (!should_hold(storage)) {
    if ((s.held || s.parked) && goes_away(storage)) {
      put_away(storage);
      return;
    }
    s.held = {};
    s.parked.clear();
  } else if (!s.is_watched && !s.held && !s.parked) {
    s.held = find(storage);
  }
}

// --- what is there

c10::Storage OpTape::find(int storage) {
  TapeStorage& s = at(storage);
  if (is_closed_ && s.was_written_unseen()) {
    return {};
  }
  if (s.held) {
    return s.held;
  }
  if (s.where) {
    if (auto impl = s.where->lock()) {
      return c10::Storage(std::move(impl));
    }
  }
  if (s.parked) {
    s.held = c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(s.bytes), std::move(s.parked));
    note_place(storage, s.held);
    if (!is_closed_ && (listener_ != nullptr || goes_away(storage))) {
      watch(storage, *s.held.unsafeGetStorageImpl());
    }
  }
  return s.held;
}

// Its memory is in other hands than before. In the forward pass the program may go on with it.
void OpTape::note_place(int storage, const c10::Storage& memory) {
  TapeStorage& s = at(storage);
  if (!is_closed_) {
    numbers_.erase(s.where->_unsafe_get_target());
    numbers_.emplace(memory.unsafeGetStorageImpl(), storage);
  }
  s.where.emplace(memory.getWeakStorageImpl());
}

// Likewise, or from where it was put away. What was to be is held from backward's first use until its last.
c10::Storage OpTape::bring(int storage) {
  TapeStorage& s = at(storage);
  c10::Storage memory = find(storage);
  if (!memory && s.away) {
    memory = load(storage);
  }
  if (memory && is_closed_ && goes_away(storage)) {
    s.claimed = true;
    settle(storage);
  }
  return memory;
}

c10::Storage OpTape::load(int storage) {
  if (listener_ != nullptr) {
    listener_->before_replay();
  }
  const UnseenOperators unseen;
  c10::Storage memory = at(storage).away->load();
  note_place(storage, memory);
  at(storage).counts.clear();  // this memory is the tape's own
  if (listener_ != nullptr) {
    listener_->after_replay();
  }
  return memory;
}

// --- rebuilding one storage

class OpTape::Replay {
 public:
  Replay(OpTape& tape, int target) : tape_(tape), found_(tape.replay_finder_.find(*this, target)) {
    if (found_.missing) {
      throw_missing(*found_.missing);
    }
    for (MadeAgain& one : found_.made) {
      one.stays = one.may_stay &&
                  (one.storage == target || tape_.stays_after_replay(one.storage) || tape_.should_hold(one.storage));
    }
    releases_.sort(found_.made, found_.operators.size());
  }

  void run() {
    for (int k = 0; k < std::ssize(found_.operators); ++k) {
      const TapeOperator& op = tape_.operators_[static_cast<size_t>(found_.operators[static_cast<size_t>(k)])];
      Stack stack = stack_for(op);
      call_again(op.op, op.context, stack, op.drew_from);
      for (const TapeOperator::Result& result : op.results) {
        const c10::IValue& value = stack[result.result];
        made_[result.storage] = (result.element ? value.toTensorVector()[*result.element] : value.toTensor()).storage();
      }
      stack.clear();
      for (const int i : releases_.after(k)) {
        made_.erase(found_.made[static_cast<size_t>(i)].storage);
      }
    }
    for (const auto& [storage, memory] : made_) {
      adopt(storage, memory);
    }
    *tape_.replayed_ += std::ssize(found_.operators);
  }

  const c10::Storage& memory_of(ValueId value) const {
    const auto found = value.version == last_version(value.storage) ? there_.find(value.storage) : there_.end();
    return found != there_.end() ? found->second : made_.at(value.storage);
  }

  // As a ReplaySource.
  int last_version(int storage) const { return tape_.at(storage).last_version(); }
  bool is_there(int storage) const { return there_.contains(storage) || tape_.find(storage); }
  bool bring(int storage) {
    if (there_.contains(storage)) {
      return true;
    }
    c10::Storage memory = tape_.bring(storage);
    return memory && there_.emplace(storage, std::move(memory)).second;
  }
  int maker(ValueId value) const {
    const TapeStorage& storage = tape_.at(value.storage);
    const int op = storage.producers[static_cast<size_t>(value.version)];
    const bool can_be = op >= 0 && !storage.is_pinned && tape_.operators_[static_cast<size_t>(op)].is_replayable;
    return can_be ? op : -1;
  }
  const std::vector<ValueId>& needs(int op) const { return tape_.operators_[static_cast<size_t>(op)].needs; }
  const std::vector<ValueId>& writes(int op) const { return tape_.operators_[static_cast<size_t>(op)].writes; }

  /// Operators were judged when they ran. Since then the program may have written to what they read.
  static void judge_all_again(OpTape& tape) {
    const auto is_there = [&](ValueId value) {
      const TapeStorage& s = tape.at(value.storage);
      return s.is_external ? value.version == s.last_version() && !s.was_written_unseen()
                           : s.is_rebuildable || s.claimed || s.away || s.slots > 0;
    };
    for (const TapeOperator& op : tape.operators_) {
      const bool can_run = op.is_replayable && std::all_of(op.needs.begin(), op.needs.end(), is_there);
      for (const ValueId& value : op.writes) {
        tape.at(value.storage).is_rebuildable = tape.at(value.storage).is_rebuildable && can_run;
      }
    }
  }

  /// What the schedule keeps, and an earlier pass that kept its graph has let go.
  static void bring_back_what_is_kept(OpTape& tape) {
    for (int s = 0; s < std::ssize(tape.storages_) && tape.cursor_.of(s) != nullptr; ++s) {
      const TapeSchedule::ForStorage& scheduled = *tape.cursor_.of(s);
      TapeStorage& storage = tape.at(s);
      storage.claimed = storage.claimed || (scheduled.keep_from_start && scheduled.needed_until >= 0);
      if (scheduled.keep_from_start && storage.is_rebuildable && tape.should_hold(s) && !tape.find(s)) {
        tape.rebuild(s);
      }
    }
  }

 private:
  [[noreturn]] void throw_missing(ValueId value) const {
    const TapeStorage& storage = tape_.at(value.storage);
    if (storage.is_external) {
      throw CannotRebuild(
          "Rematerialize: a parameter, buffer or input was written in place after the forward pass read it, and is "
          "needed to rebuild what backward asks for; go backward before you write to it");
    }
    throw CannotRebuild(
        fmt::format("Rematerialize: the result of operator {}, which is needed to rebuild what backward asks for, is "
                    "gone and cannot be made again; was it written in place after the forward pass?",
                    storage.producers[static_cast<size_t>(value.version)]));
  }

  Stack stack_for(const TapeOperator& op) const {
    Stack stack(op.arguments.begin(), op.arguments.end());
    std::optional<size_t> copied;
    for (const TapeOperator::Operand& operand : op.operands) {
      at::Tensor tensor = on_storage(operand.shape, memory_of(operand.value));
      if (!operand.element) {
        stack[operand.argument] = std::move(tensor);
        continue;
      }
      if (copied != operand.argument) {
        stack[operand.argument] = stack[operand.argument].toList().copy();
        copied = operand.argument;
      }
      stack[operand.argument].toList().set(*operand.element, std::move(tensor));
    }
    return stack;
  }

  void adopt(int storage, const c10::Storage& memory) {
    TapeStorage& s = tape_.at(storage);
    tape_.note_place(storage, memory);
    s.held = {};
    s.counts.clear();  // this memory is the tape's own
    s.is_watched = false;
    s.claimed = s.claimed || tape_.stays_after_replay(storage);
    if (tape_.should_hold(storage)) {
      s.held = memory;
    }
  }

  OpTape& tape_;
  std::unordered_map<int, c10::Storage> there_;  // what it reads, held until it is over
  std::unordered_map<int, c10::Storage> made_;   // what it has made and not released
  FoundReplay found_;
  ReleaseOrder releases_;
};

bool OpTape::stays_after_replay(int storage) const {
  if (!is_closed_) {  // a backward pass inside the forward pass asks for one layer after the other
    return storages_[static_cast<size_t>(storage)].slots > 0;
  }
  const TapeSchedule::ForStorage* scheduled = cursor_.of(storage);
  return scheduled != nullptr && cursor_.stays_after_replay(*scheduled);
}

// --- unpacking

void OpTape::begin_unpacking(Slot& slot) {
  const int pass = current_pass();
  const bool kept_graph = std::exchange(keeps_graph_, pass < 0 || torch::autograd::get_current_graph_task_keep_graph());
  if (cursor_.begin(pass)) {
    if (keeps_graph_) {
      Replay::judge_all_again(*this);
    }
    if (kept_graph) {
      Replay::bring_back_what_is_kept(*this);
    }
  }
  slot.pass = pass;
  cursor_.arrive(slot.storage);
}

// What nobody needs from here on in this pass. If the graph is kept, another one may come, which rebuilds what the first has let go.
void OpTape::let_go() {
  while (const TapeSchedule::Unpacking* over = cursor_.next_to_let_go()) {
    for (const int s : over->last_for) {
      const bool cannot_come_again = !at(s).is_rebuildable && !at(s).away;
      at(s).claimed = at(s).claimed && cannot_come_again && (keeps_graph_ || cursor_.is_guess());
      settle(s);
    }
    if (keeps_graph_) {
      settle(over->storage);
    }
  }
}

// A schedule knows what nothing asks for but a backward pass inside the forward pass: it has no unpacking of it.
bool OpTape::note_early_ask(int storage) {
  TapeStorage& s = at(storage);
  if (!is_closed_ && !s.is_asked_early) {
    const TapeSchedule::ForStorage* scheduled = cursor_.of(storage);
    const bool is_expected =
        scheduled != nullptr && scheduled->unpacked_at.empty() && cursor_.due(operators_.size()) != nullptr;
    s.is_asked_early = listener_ != nullptr || is_expected;
  }
  return s.is_asked_early;
}

c10::Storage OpTape::rebuild(int storage) {
  Replay replay(*this, storage);
  if (listener_ != nullptr) {
    listener_->before_replay();
  }
  replay.run();
  if (listener_ != nullptr) {
    listener_->after_replay();
  }
  return replay.memory_of({storage, at(storage).last_version()});
}

at::Tensor OpTape::values_of(const Slot& slot) {
  c10::Storage memory = bring(slot.storage);
  if (!memory) {
    memory = rebuild(slot.storage);
  }
  at::Tensor result = on_storage(slot.shape, memory);
  if (slot.values) {
    const UnseenOperators unseen;
    if (*slot.values != tensor_hash(result)) {
      different_.insert(slot.storage);
    }
  }
  return result;
}

at::Tensor OpTape::unpack(std::any& packed) {
  if (const auto* tensor = std::any_cast<at::Tensor>(&packed)) {
    return *tensor;
  }
  Slot& slot = *std::any_cast<std::shared_ptr<Slot>&>(packed);
  const std::lock_guard lock(mutex_);
  if (note_early_ask(slot.storage)) {
    return values_of(slot);
  }
  close();
  if (slot.pass >= 0 && slot.pass == current_pass()) {
    return values_of(slot);
  }
  begin_unpacking(slot);
  if (listener_ != nullptr) {
    listener_->on_unpack(slot.storage);
  }
  at::Tensor result = values_of(slot);
  if (!keeps_graph_ && !std::exchange(slot.is_used, true)) {
    ++at(slot.storage).uses;
    settle(slot.storage);
  }
  let_go();
  if (listener_ != nullptr) {
    listener_->after_unpack();
  }
  return result;
}

void OpTape::slot_is_gone(Slot& slot) {
  const std::lock_guard lock(mutex_);
  TapeStorage& storage = at(slot.storage);
  --storage.slots;
  if (slot.is_used) {
    --storage.uses;
    if (listener_ != nullptr) {
      listener_->on_done(slot.storage);
    }
  } else if (listener_ != nullptr) {
    listener_->on_unused(slot.storage);
  }
  settle(slot.storage);
  if (!slot.is_used && cursor_.is_guess()) {
    cursor_.arrive(slot.storage);  // the guess was that somebody would ask for it
    let_go();
  }
}

}  // namespace snug::detail
