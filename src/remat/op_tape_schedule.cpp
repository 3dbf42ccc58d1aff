#include <algorithm>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/SmallVector.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "src/core/has_bytes.h"
#include "src/planner/profile.h"
#include "src/remat/op_tape.h"

// Comparing operators with the schedule
//
// Problem: a schedule was made from a profile, and the model may run other operators today: a branch, another shape. A
// result must stay right.
//
// Options: refuse to run, or follow the schedule as far as the schedule is true.
//
// Choice: the tape compares each operator with the schedule by name, wiring and number of results. Sizes may be
// smaller; larger results are noted, and the schedule goes on. Storages made from the first different operator on are
// not scheduled, and are kept.
//
// Consequence: results dropped before the difference still need the operands. If an unscheduled operator is about to
// overwrite values that cannot be made again, save_from_write() first rebuilds and keeps the dropped results that
// depend on the values.

namespace snug::detail {
namespace {

// A shorter last batch takes fewer bytes than planned.
bool fits(std::span<const int64_t> bytes, std::span<const int64_t> planned) {
  return std::equal(bytes.begin(), bytes.end(), planned.begin(), planned.end(), std::less_equal<>());
}

}  // namespace

void OpTape::follow_schedule(const TapeOperator& record) {
  if (cursor_.schedule() == nullptr || !deviation().empty()) {
    return;
  }
  const size_t k = operators_.size();
  const TapeSchedule::Made* due = cursor_.due(k);
  const int first = record.results.empty() ? -1 : record.results.front().storage;
  c10::SmallVector<int64_t, 4> bytes;
  for (const auto& result : record.results) {
    bytes.push_back(at(result.storage).counted_bytes());
  }
  const auto told = [&] {
    return fmt::format(
        "operator {} is {} ({} bytes) and was {}", k, c10::toString(record.op.operator_name()), fmt::join(bytes, " + "),
        due == nullptr ? "none" : fmt::format("{} ({} bytes)", c10::toString(due->op), fmt::join(due->bytes, " + ")));
  };
  const bool is_due =
      due != nullptr && due->op == record.op.operator_name() && due->bytes.size() == static_cast<size_t>(bytes.size());
  if (!is_due || due->wiring != wiring_of(record.needs, record.writes)) {
    cursor_.deviate(told() + (is_due ? ", on other operands" : ""),
                    first >= 0 ? first : static_cast<int>(storages_.size()));
    return;
  }
  if (growth_.empty() && !fits({bytes.data(), bytes.size()}, due->bytes)) {
    growth_ = told();
  }
  for (const auto& result : record.results) {
    const TapeSchedule::ForStorage* scheduled = cursor_.of(result.storage);
    at(result.storage).claimed = scheduled != nullptr && scheduled->keep_from_start;
    settle(result.storage);
  }
}

// Judges whether the values written by the operator can be made again, from storages that the schedule keeps or counts
// on and from storages that can be made again.
void OpTape::judge(const TapeOperator& record) {
  const bool can_be =
      record.is_replayable && std::all_of(record.needs.begin(), record.needs.end(), [&](plan::Value value) {
        const TapeStorage& storage = at(value.storage);
        return storage.is_external() || storage.is_rebuildable || has_value(value);
      });
  for (const plan::Value& value : record.writes) {
    TapeStorage& storage = at(value.storage);
    const c10::Storage memory = value.version > 0 && !storage.is_external() ? storage.holding.find() : c10::Storage();
    const bool was_resized = memory && static_cast<int64_t>(memory.nbytes()) != storage.bytes;
    const TapeSchedule::ForStorage* scheduled = cursor_.of(value.storage);
    const bool was_pinned = scheduled != nullptr && scheduled->is_pinned;
    storage.is_pinned = storage.is_pinned || was_resized || was_pinned;
    storage.is_rebuildable = can_be && !storage.is_pinned;
    // The schedule promises the storage to backward, whoever held the storage when the profile was taken.
    if (scheduled != nullptr && !storage.is_external() && !storage.is_rebuildable && !scheduled->is_offloaded &&
        scheduled->needed_until >= 0) {
      storage.claimed = true;
      settle(value.storage);
    }
    if (was_resized) {
      storage.bytes = static_cast<int64_t>(memory.nbytes());
      if (listener_ != nullptr || goes_away(value.storage)) {
        watch(value.storage, *memory.unsafeGetStorageImpl());
      }
      if (listener_ != nullptr) {
        listener_->on_resized(value.storage);
      }
    }
    if (region_) {
      judge_in_region(record, value.storage);
    }
    if (drops_everything_ && !storage.is_rebuildable && store_ == nullptr) {
      storage.claimed = true;  // so that storages made from this storage can be rebuilt
      settle(value.storage);
    }
  }
}

// Called before an operator writes. If the operator is not in the schedule and writes to values that cannot be made
// again, the earlier values are lost, and everything that the schedule has dropped and would rebuild from the earlier
// values. Then rebuilds and keeps the dropped results.
void OpTape::save_from_write(const TapeOperator& record, const std::vector<at::Tensor>& written,
                             const std::vector<at::Tensor>& statistics) {
  if (cursor_.schedule() == nullptr || (written.empty() && statistics.empty())) {
    return;
  }
  std::set<int> lost;
  const auto note = [&](int storage) {
    if (at(storage).is_external() || !at(storage).is_rebuildable) {
      lost.insert(storage);
    }
  };
  std::vector<plan::Value> writes;
  for (const at::Tensor& tensor : written) {
    if (has_bytes(tensor)) {
      const int storage = number_of(tensor);
      const plan::Value value{storage, at(storage).last_version() + 1};
      if (std::find(writes.begin(), writes.end(), value) == writes.end()) {
        writes.push_back(value);
      }
      note(storage);
    }
  }
  for (const at::Tensor& tensor : statistics) {
    if (has_bytes(tensor)) {
      note(number_of(tensor));
    }
  }
  if (lost.empty()) {
    return;
  }
  const TapeSchedule::Made* due = deviation().empty() ? cursor_.due(operators_.size()) : nullptr;
  for (size_t i = 0; due != nullptr && i < due->bytes.size(); ++i) {
    writes.push_back({static_cast<int>(storages_.size() + i), 0});
  }
  const bool is_due =
      due != nullptr && due->op == record.op.operator_name() && due->wiring == wiring_of(record.needs, writes);
  if (!is_due) {
    keep_what_depends_on(lost);
  }
}

void OpTape::keep_what_depends_on(const std::set<int>& lost) {
  std::vector<bool> can_come(storages_.size(), false);  // storages that can be made again
  const auto will_be_there = [&](plan::Value value) {
    const TapeStorage& s = at(value.storage);
    if (s.is_external() || lost.contains(value.storage)) {
      return !lost.contains(value.storage) && value.version == s.last_version();
    }
    return can_come[static_cast<size_t>(value.storage)] || has_value(value);
  };
  for (const TapeOperator& op : operators_) {
    const bool can_run = op.is_replayable && std::all_of(op.needs.begin(), op.needs.end(), will_be_there);
    for (const plan::Value& value : op.writes) {
      can_come[static_cast<size_t>(value.storage)] = can_run && at(value.storage).is_rebuildable;
    }
  }
  std::vector<int> last_chance;
  for (int s = 0; s < static_cast<int>(storages_.size()); ++s) {
    if (!at(s).is_external() && at(s).is_rebuildable && !can_come[static_cast<size_t>(s)]) {
      last_chance.push_back(s);
    }
  }
  std::vector<c10::Storage> made;  // until settle() decides
  for (const int s : last_chance) {
    if (at(s).slots > 0 && !goes_away(s) && !find(s)) {
      try {
        made.push_back(rebuild(s));
      } catch (const CannotRebuild&) {  // backward reports the error, if backward asks
      }
    }
  }
  for (const int s : last_chance) {
    at(s).is_rebuildable = false;
    settle(s);
  }
}

}  // namespace snug::detail
