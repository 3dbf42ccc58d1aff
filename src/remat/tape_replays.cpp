#include "src/remat/tape_replays.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/activations/storage_views.h"
#include "src/memory/cpu_allocator.h"
#include "src/memory/held.h"
#include "src/planner/at.h"

// Operators that run again
//
// Problem: backward asks for a storage that is gone. The operands of the storage's producer may be gone too.
//
// Choice: planner/replay.h finds the operators to run, and how long each result is needed. The simulator predicts
// replays with the same code. Replay tells the finder the facts about storages on the tape, runs the operators, and
// gives results that stay to the tape.
//
// Consequences:
// - A failed search throws CannotRebuild before any operator runs.
// - Eviction drops storages that the schedule keeps, so rules that rest on the schedule do not suffice. An evicted
//   storage must not depend on a storage that the schedule lets go: secure() holds these sources until the end of the
//   tape. Nor may a scheduled write destroy the sources: TapeWriter::save_from_write() then treats each write as one
//   that is not in the schedule. The oldest storages go first, because backward asks for them last, when most memory is
//   free. So one replay can make and keep many evicted storages, as in a checkpointed region.
// - Operators also run again where values that cannot be made again are replaced: before an operator that is not in the
//   schedule writes, and after a write that no operator made. keep_what_depends_on() rebuilds and keeps the dropped
//   results that depend on the values, as far as the values are still there.

namespace snug::detail {

class TapeReplays::Replay {
 public:
  Replay(TapeReplays& replays, const std::vector<int>& targets)
      : replays_(replays),
        storages_(replays.storages_),
        target_(targets.front()),
        found_(replays.replay_finder_.find(*this, targets)) {
    if (found_.missing) {
      throw_missing(*found_.missing);
    }
    for (plan::MadeAgain& one : found_.made) {
      one.stays = one.may_stay && (one.storage == targets.front() || replays_.stays_after_replay(one.storage) ||
                                   storages_.should_hold(one.storage) || is_evicted(one.storage));
    }
    releases_.sort(found_.made, found_.operators.size());
  }

  void run() {
    const Replaced running(replays_.running_, this);
    for (int k = 0; k < std::ssize(found_.operators); ++k) {
      now_ = k;
      const TapeOperator& op = replays_.at(found_.operators[static_cast<size_t>(k)]);
      Stack stack = stack_for(op);
      call_again(op.op, op.context, stack, op.drew_from);
      for (const TapeOperator::Result& result : op.results) {
        const c10::IValue& value = stack[result.result];
        made_[result.storage] = (result.element ? value.toTensorVector()[*result.element] : value.toTensor()).storage();
        if (replays_.state_.verifies && makes_no_values(op.op)) {
          TapeStorages::poison(made_[result.storage]);  // the program may have written values through a pointer
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
    *replays_.replayed_ += std::ssize(found_.operators);
    replays_.replayed_in_pass_ += std::ssize(found_.operators);
  }

  // Releases storages that would stay after the replay, and that the replay itself needs no more. Returns the number of
  // released bytes.
  int64_t evict(int64_t bytes) {
    int64_t released = 0;
    for (const plan::MadeAgain& one : found_.made) {
      if (released < bytes && one.last < now_ && one.storage != target_ && made_.contains(one.storage) &&
          replays_.secure(one.storage)) {
        made_.erase(one.storage);
        released += storages_.at(one.storage).bytes;
      }
    }
    return released;
  }

  const c10::Storage& memory_of(plan::Value value) const {
    const auto found = value.version == last_version(value.storage) ? there_.find(value.storage) : there_.end();
    return found != there_.end() ? found->second : made_.at(value.storage);
  }

  // The interface of a plan::ReplaySource.
  int last_version(int storage) const { return storages_.at(storage).last_version(); }
  bool is_there(int storage) const { return there_.contains(storage) || storages_.find(storage); }
  bool bring(int storage) {
    if (there_.contains(storage)) {
      return true;
    }
    c10::Storage memory = storages_.bring(storage);
    return memory && there_.emplace(storage, std::move(memory)).second;
  }
  int maker(plan::Value value) const {
    const TapeStorage& storage = storages_.at(value.storage);
    const int op = storage.producers[static_cast<size_t>(value.version)];
    const bool is_source = storage.is_source && !replays_.state_.region;  // see secure()
    const bool can_be = op >= 0 && !storage.is_pinned && !is_source && replays_.at(op).is_replayable;
    return can_be ? op : -1;
  }
  std::span<const plan::Value> needs(int op) const { return replays_.at(op).needs; }
  std::span<const plan::Value> writes(int op) const { return replays_.at(op).writes; }

 private:
  bool is_evicted(int storage) const { return storages_.at(storage).is_evicted && storages_.at(storage).slots > 0; }

  static bool makes_no_values(const c10::OperatorHandle& op) {
    const std::string_view name = op.schema().name();
    return name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
  }

  [[noreturn]] void throw_missing(plan::Value value) const {
    const TapeStorage& storage = storages_.at(value.storage);
    if (storage.is_external()) {
      throw CannotRebuild(
          replays_.state_.name() +
          ": a parameter, buffer or input was written in place after the forward pass read it, or its memory given "
          "back, and is needed to rebuild what backward asks for; go backward before you change it");
    }
    throw CannotRebuild(
        fmt::format("{}: the result of operator {}, which is needed to rebuild what backward asks for, is gone and "
                    "cannot be made again; was it written in place after the forward pass?",
                    replays_.state_.name(), storage.producers[static_cast<size_t>(value.version)]));
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
    TapeStorage& s = storages_.at(storage);
    storages_.replace(storage, memory);
    s.counts.clear();  // this memory belongs to the tape alone
    s.is_watched = s.is_evicted = false;
    s.claimed = s.claimed || replays_.stays_after_replay(storage);
    s.holding.hold(storages_.should_hold(storage) ? memory : c10::Storage());
    if (replays_.state_.region && s.slots > 0) {
      report_saved_for_backward(memory.data());
    }
  }

  TapeReplays& replays_;
  TapeStorages& storages_;
  std::unordered_map<int, c10::Storage> there_;  // storages that the replay reads, held until the end of the replay
  std::unordered_map<int, c10::Storage> made_;   // storages that the replay has made and not released
  const int target_;
  plan::FoundReplay found_;
  plan::ReleaseOrder releases_;
  int now_ = 0;  // position in found_.operators
};

TapeReplays::TapeReplays(TapeState& state, TapeStorages& storages) : state_(state), storages_(storages) {
  if (const TapeSchedule* schedule = state_.cursor.schedule()) {
    operators_.reserve(schedule->operators.size());
  }
}

// Judges whether the values written by the operator can be made again, from storages that the schedule keeps or counts
// on and from storages that can be made again.
void TapeReplays::judge(const RunningOperator& running) {
  const TapeOperator& record = running.record;
  const bool can_be =
      record.is_replayable && std::all_of(record.needs.begin(), record.needs.end(), [&](plan::Value value) {
        const TapeStorage& storage = storages_.at(value.storage);
        return storage.is_external() || storage.is_rebuildable || storages_.has_value(value);
      });
  for (const plan::Value& value : record.writes) {
    TapeStorage& storage = storages_.at(value.storage);
    const c10::Storage memory = value.version > 0 && !storage.is_external() ? storage.holding.find() : c10::Storage();
    const bool was_resized = memory && static_cast<int64_t>(memory.nbytes()) != storage.bytes;
    const TapeSchedule::ForStorage* scheduled = state_.cursor.of(value.storage);
    const bool was_pinned = scheduled != nullptr && scheduled->is_pinned;
    storage.is_pinned = storage.is_pinned || was_resized || was_pinned;
    storage.is_rebuildable = can_be && !storage.is_pinned;
    // The schedule promises the storage to backward, whoever held the storage when the profile was taken.
    if (scheduled != nullptr && !storage.is_external() && !storage.is_rebuildable && !scheduled->is_offloaded &&
        scheduled->needed_until >= 0) {
      storages_.claim(value.storage);
    }
    if (was_resized) {
      storage.bytes = static_cast<int64_t>(memory.nbytes());
      if (state_.has_listener() || storages_.goes_away(value.storage)) {
        storages_.watch(value.storage, *memory.unsafeGetStorageImpl());
      }
      state_.listener->on_resized(value.storage);
    }
    if (state_.region) {
      judge_in_region(running, value.storage);
    }
    if (storages_.drops_all_that_can_be_rebuilt() && !storage.is_rebuildable) {
      storages_.claim(value.storage);  // so that storages made from this storage can be rebuilt
    }
  }
}

bool TapeReplays::stays_after_replay(int storage) const {
  if (!state_.is_closed) {  // a backward pass inside the forward pass asks for layer after layer
    return storages_.at(storage).slots > 0;
  }
  if (state_.region) {
    return storages_.at(storage).unasked > 0;
  }
  const TapeSchedule::ForStorage* scheduled = state_.cursor.of(storage);
  return scheduled != nullptr && state_.cursor.stays_after_replay(*scheduled);
}

c10::Storage TapeReplays::rebuild(int storage) {
  if (state_.region && !state_.is_closed) {
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
  state_.as_replay([&] { replay->run(); });
  if (state_.region && state_.is_closed) {
    let_go_of_operands();
  }
  return replay->memory_of({storage, storages_.at(storage).last_version()});
}

// Judges again which storages can be rebuilt. Operators were judged when the operators ran; since then the program may
// have written to the operands.
void TapeReplays::judge_all_again() {
  const auto is_there = [&](plan::Value value) {
    const TapeStorage& s = storages_.at(value.storage);
    return s.is_external() ? value.version == s.last_version() && !s.has_changed_unseen()
                           : s.is_rebuildable || s.claimed || s.holding.is_away() || (s.slots > 0 && !s.is_evicted);
  };
  forget_secured();
  for (const TapeOperator& op : operators_) {
    const bool can_run = op.is_replayable && std::all_of(op.needs.begin(), op.needs.end(), is_there);
    for (const plan::Value& value : op.writes) {
      storages_.at(value.storage).is_rebuildable = storages_.at(value.storage).is_rebuildable && can_run;
    }
  }
}

// Rebuilds storages that the schedule keeps and that an earlier pass, which kept the graph, has let go.
void TapeReplays::bring_back_what_is_kept() {
  for (int s = 0; s < storages_.size() && state_.cursor.of(s) != nullptr; ++s) {
    const TapeSchedule::ForStorage& scheduled = *state_.cursor.of(s);
    TapeStorage& storage = storages_.at(s);
    storage.claimed = storage.claimed || (scheduled.keep_from_start && scheduled.needed_until >= 0);
    if (scheduled.keep_from_start && storage.is_rebuildable && storages_.should_hold(s) && !storages_.find(s)) {
      rebuild(s);
    }
  }
}

// --- values that make room

int64_t TapeReplays::evict(int64_t bytes) {
  int64_t released = running_ != nullptr ? running_->evict(bytes) : 0;
  for (int s = 0; s < storages_.size() && released < bytes; ++s) {
    if (storages_.is_evictable(s) && secure(s)) {
      storages_.evict(s);
      released += storages_.at(s).bytes;
    }
  }
  return released;
}

bool TapeReplays::can_run_again(int op, bool is_proven) const {
  const TapeOperator& record = at(op);
  const TapeSchedule::Made* due = state_.cursor.due(op);
  const bool is_safe = record.is_safe && record.op.schema().name().starts_with("aten::");
  return record.is_replayable && (is_safe || is_proven) && (due == nullptr || due->is_replayable);
}

// Whether the storage can be made again whatever the tape drops later. Then the tape holds all that cannot be made
// again and that the storage is made from. The trial of the plan has not shown that values come back with the same
// bits, so the rule is the rule of a region (tape_region.cpp): LibTorch's operators of the graph run again, and
// operators that draw. All other values that the storage is made from are held, but for values that the plan drops.
bool TapeReplays::secure(int storage) {
  if (is_insecure_.contains(storage)) {
    return false;
  }
  is_secured_.resize(operators_.size(), false);
  struct Needed {
    plan::Value value;
    bool is_in_plan;  // for a storage that the plan drops: the trial has compared the values that come back
  };
  std::vector<Needed> pending{{{storage, storages_.at(storage).last_version()}, false}};
  std::vector<int> sources;
  std::set<int> run;
  while (!pending.empty()) {
    const auto [value, is_in_plan] = pending.back();
    pending.pop_back();
    const TapeStorage& s = storages_.at(value.storage);
    const bool is_latest = value.version == s.last_version();
    const int op = s.producers[plan::at(value.version)];
    const bool is_proven = is_in_plan || storages_.is_dropped_by_plan(value.storage);
    const bool can_run =
        !s.is_external() && s.is_rebuildable && !s.is_source && op >= 0 && op < next() && can_run_again(op, is_proven);
    if (can_run && is_secured_[plan::at(op)]) {
      continue;
    }
    if (can_run && run.insert(op).second) {
      for (const plan::Value& need : at(op).needs) {
        pending.push_back({need, is_proven});
      }
    } else if (!can_run) {
      const bool is_there = s.is_external() ? !s.has_changed_unseen() : storages_.find(value.storage).operator bool();
      if (value.storage == storage || !is_latest || !is_there) {
        is_insecure_.insert(storage);
        return false;
      }
      sources.push_back(value.storage);
    }
  }
  for (const int source : sources) {
    storages_.at(source).is_source = true;
    storages_.settle(source);
  }
  for (const int op : run) {
    is_secured_[plan::at(op)] = true;
  }
  return true;
}

// --- values that are lost

// Finds writes since the tensor was last seen that no operator made. The written values are not made again.
void TapeReplays::note_write_through_pointer(int storage, const at::Tensor& tensor) {
  WriteCount& count = storages_.at(storage).count_of(tensor);
  if (count.moved()) {
    count.accept();
    note_unseen_write(storage);
  }
}

void TapeReplays::note_unseen_write(int storage) {
  TapeStorage& s = storages_.at(storage);
  const bool is_lost = s.is_external() || !s.is_rebuildable || s.is_source;
  s.producers.push_back(-1);
  const plan::Value written{storage, s.last_version()};
  s.is_rebuildable = s.is_external();
  const bool may_be_needed =
      state_.region ? std::exchange(s.is_read, false) : storages_.has_evicted() && !state_.is_closed;
  forget_secured();
  if (may_be_needed && is_lost) {
    keep_what_depends_on({storage});
  }
  state_.listener->before_operator();
  state_.listener->after_operator({.name = std::string(plan::kOtherWrite), .writes = {written}, .replayable = false},
                                  {});
}

void TapeReplays::note_all_unseen_writes() {
  for (int s = 0; s < storages_.size(); ++s) {
    const TapeStorage& storage = storages_.at(s);
    if (storage.has_changed_unseen() && !storage.was_dropped && storage.holding.is_in_use()) {
      note_unseen_write(s);
    }
    for (WriteCount& count : storages_.at(s).counts) {
      count.accept();
    }
  }
}

void TapeReplays::keep_evicted_before_write(int storage) {
  const TapeStorage& s = storages_.at(storage);
  if (storages_.has_evicted() && (s.is_external() || !s.is_rebuildable || s.is_source)) {
    keep_what_depends_on({storage});
  }
}

// `lost`: storages with values that are about to be replaced, or were replaced, and that cannot be made again.
void TapeReplays::keep_what_depends_on(const std::set<int>& lost) {
  std::vector<bool> can_come(plan::at(storages_.size()), false);  // storages that can be made again
  const auto will_be_there = [&](plan::Value value) {
    const TapeStorage& s = storages_.at(value.storage);
    if (s.is_external() || lost.contains(value.storage)) {
      return !lost.contains(value.storage) && value.version == s.last_version();
    }
    return can_come[plan::at(value.storage)] || storages_.has_value(value);
  };
  for (const TapeOperator& op : operators_) {
    const bool can_run = op.is_replayable && std::all_of(op.needs.begin(), op.needs.end(), will_be_there);
    for (const plan::Value& value : op.writes) {
      can_come[plan::at(value.storage)] = can_run && storages_.at(value.storage).is_rebuildable;
    }
  }
  std::vector<int> last_chance;
  for (int s = 0; s < storages_.size(); ++s) {
    if (!storages_.at(s).is_external() && storages_.at(s).is_rebuildable && !can_come[plan::at(s)]) {
      last_chance.push_back(s);
    }
  }
  forget_secured();
  for (const int s : last_chance) {
    storages_.at(s).is_rebuildable = false;  // first, so that making one storage evicts no other
  }
  std::vector<c10::Storage> made;  // until settle() decides
  for (const int s : last_chance) {
    if (storages_.at(s).slots > 0 && !storages_.goes_away(s) && !storages_.find(s)) {
      try {
        made.push_back(rebuild(s));
      } catch (const CannotRebuild&) {  // backward reports the error, if backward asks
      }
    }
  }
  std::ranges::for_each(last_chance, [&](int s) { storages_.settle(s); });
}

}  // namespace snug::detail
