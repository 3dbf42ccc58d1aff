#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/activations/storage_views.h"
#include "src/memory/cpu_allocator.h"
#include "src/planner/replay.h"
#include "src/remat/op_tape.h"

// Operators that run again
//
// Problem: backward asks for a storage that is gone. The operands of the storage's producer may be gone too.
//
// Choice: planner/replay.h finds the operators to run, and how long each result is needed. The simulator predicts
// replays with the same code. Replay tells the finder the facts about storages on the tape, runs the operators, and
// gives results that stay to the tape.
//
// Consequence: a failed search throws CannotRebuild before any operator runs.

namespace snug::detail {
class OpTape::Replay {
 public:
  Replay(OpTape& tape, const std::vector<int>& targets)
      : tape_(tape), found_(tape.replay_finder_.find(*this, targets)) {
    if (found_.missing) {
      throw_missing(*found_.missing);
    }
    for (plan::MadeAgain& one : found_.made) {
      one.stays = one.may_stay && (one.storage == targets.front() || tape_.stays_after_replay(one.storage) ||
                                   tape_.should_hold(one.storage));
    }
    releases_.sort(found_.made, found_.operators.size());
  }

  int64_t operators() const { return std::ssize(found_.operators); }

  void run() {
    for (int k = 0; k < std::ssize(found_.operators); ++k) {
      const TapeOperator& op = tape_.operators_[static_cast<size_t>(found_.operators[static_cast<size_t>(k)])];
      Stack stack = stack_for(op);
      call_again(op.op, op.context, stack, op.drew_from);
      for (const TapeOperator::Result& result : op.results) {
        const c10::IValue& value = stack[result.result];
        made_[result.storage] = (result.element ? value.toTensorVector()[*result.element] : value.toTensor()).storage();
        if (tape_.verifies_ && makes_no_values(op.op)) {
          poison(made_[result.storage]);  // the program may have written values through a pointer
        }
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

  const c10::Storage& memory_of(plan::Value value) const {
    const auto found = value.version == last_version(value.storage) ? there_.find(value.storage) : there_.end();
    return found != there_.end() ? found->second : made_.at(value.storage);
  }

  // The interface of a plan::ReplaySource.
  int last_version(int storage) const { return tape_.at(storage).last_version(); }
  bool is_there(int storage) const { return there_.contains(storage) || tape_.find(storage); }
  bool bring(int storage) {
    if (there_.contains(storage)) {
      return true;
    }
    c10::Storage memory = tape_.bring(storage);
    return memory && there_.emplace(storage, std::move(memory)).second;
  }
  int maker(plan::Value value) const {
    const TapeStorage& storage = tape_.at(value.storage);
    const int op = storage.producers[static_cast<size_t>(value.version)];
    const bool can_be = op >= 0 && !storage.is_pinned && tape_.operators_[static_cast<size_t>(op)].is_replayable;
    return can_be ? op : -1;
  }
  std::span<const plan::Value> needs(int op) const { return tape_.operators_[static_cast<size_t>(op)].needs; }
  std::span<const plan::Value> writes(int op) const { return tape_.operators_[static_cast<size_t>(op)].writes; }

 private:
  static bool makes_no_values(const c10::OperatorHandle& op) {
    const std::string_view name = op.schema().name();
    return name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
  }

  [[noreturn]] void throw_missing(plan::Value value) const {
    const TapeStorage& storage = tape_.at(value.storage);
    if (storage.is_external()) {
      throw CannotRebuild(
          tape_.name() +
          ": a parameter, buffer or input was written in place after the forward pass read it, or its memory given "
          "back, and is needed to rebuild what backward asks for; go backward before you change it");
    }
    throw CannotRebuild(
        fmt::format("{}: the result of operator {}, which is needed to rebuild what backward asks for, is gone and "
                    "cannot be made again; was it written in place after the forward pass?",
                    tape_.name(), storage.producers[static_cast<size_t>(value.version)]));
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
    tape_.begin_streams(storage, memory);
    s.counts.clear();  // this memory belongs to the tape alone
    s.is_watched = false;
    s.claimed = s.claimed || tape_.stays_after_replay(storage);
    s.holding.hold(tape_.should_hold(storage) ? memory : c10::Storage());
    if (tape_.region_ && s.slots > 0) {
      report_saved_for_backward(memory.data());
    }
  }

  OpTape& tape_;
  std::unordered_map<int, c10::Storage> there_;  // storages that the replay reads, held until the end of the replay
  std::unordered_map<int, c10::Storage> made_;   // storages that the replay has made and not released
  plan::FoundReplay found_;
  plan::ReleaseOrder releases_;
};

bool OpTape::stays_after_replay(int storage) const {
  if (!is_closed_) {  // a backward pass inside the forward pass asks for layer after layer
    return storages_[static_cast<size_t>(storage)].slots > 0;
  }
  if (region_) {
    return storages_[static_cast<size_t>(storage)].unasked > 0;
  }
  const TapeSchedule::ForStorage* scheduled = cursor_.of(storage);
  return scheduled != nullptr && cursor_.stays_after_replay(*scheduled);
}

c10::Storage OpTape::rebuild(int storage) {
  if (region_ && !is_closed_) {
    note_all_unseen_writes();
  }
  const std::vector<int> targets = targets_with(storage);
  std::optional<Replay> replay;
  try {
    replay.emplace(*this, targets);
  } catch (const CannotRebuild&) {  // another target may be the storage that cannot be made
    if (targets.size() == 1) {
      throw;
    }
    replay.emplace(*this, std::vector{storage});
  }
  as_replay([&] { replay->run(); });
  if (region_ && is_closed_) {
    replayed_in_pass_ += replay->operators();
    let_go_of_operands();
  }
  return replay->memory_of({storage, at(storage).last_version()});
}

// Judges again which storages can be rebuilt. Operators were judged when the operators ran; since then the program may
// have written to the operands.
void OpTape::judge_all_again() {
  const auto is_there = [&](plan::Value value) {
    const TapeStorage& s = at(value.storage);
    return s.is_external() ? value.version == s.last_version() && !s.has_changed_unseen()
                           : s.is_rebuildable || s.claimed || s.holding.is_away() || s.slots > 0;
  };
  for (const TapeOperator& op : operators_) {
    const bool can_run = op.is_replayable && std::all_of(op.needs.begin(), op.needs.end(), is_there);
    for (const plan::Value& value : op.writes) {
      at(value.storage).is_rebuildable = at(value.storage).is_rebuildable && can_run;
    }
  }
}

// Rebuilds storages that the schedule keeps and that an earlier pass, which kept the graph, has let go.
void OpTape::bring_back_what_is_kept() {
  for (int s = 0; s < std::ssize(storages_) && cursor_.of(s) != nullptr; ++s) {
    const TapeSchedule::ForStorage& scheduled = *cursor_.of(s);
    TapeStorage& storage = at(s);
    storage.claimed = storage.claimed || (scheduled.keep_from_start && scheduled.needed_until >= 0);
    if (scheduled.keep_from_start && storage.is_rebuildable && should_hold(s) && !find(s)) {
      rebuild(s);
    }
  }
}

}  // namespace snug::detail
