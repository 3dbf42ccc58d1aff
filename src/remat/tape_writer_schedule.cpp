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
#include "src/remat/tape_schedule.h"
#include "src/remat/tape_writer.h"

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

void TapeWriter::follow_schedule(const TapeOperator& record) {
  if (state_.cursor.schedule() == nullptr || !state_.cursor.deviation().empty()) {
    return;
  }
  const int k = replays_.next();
  const TapeSchedule::Made* due = state_.cursor.due(k);
  const int first = record.results.empty() ? -1 : record.results.front().storage;
  c10::SmallVector<int64_t, 4> bytes;
  for (const auto& result : record.results) {
    bytes.push_back(storages_.at(result.storage).counted_bytes());
  }
  const auto told = [&] {
    return fmt::format(
        "operator {} is {} ({} bytes) and was {}", k, c10::toString(record.op.operator_name()), fmt::join(bytes, " + "),
        due == nullptr ? "none" : fmt::format("{} ({} bytes)", c10::toString(due->op), fmt::join(due->bytes, " + ")));
  };
  const bool is_due =
      due != nullptr && due->op == record.op.operator_name() && due->bytes.size() == static_cast<size_t>(bytes.size());
  if (!is_due || due->wiring != wiring_of(record.needs, record.writes)) {
    state_.cursor.deviate(told() + (is_due ? ", on other operands" : ""), first >= 0 ? first : storages_.size());
    return;
  }
  if (growth_.empty() && !fits({bytes.data(), bytes.size()}, due->bytes)) {
    growth_ = told();
  }
  for (const auto& result : record.results) {
    const TapeSchedule::ForStorage* scheduled = state_.cursor.of(result.storage);
    storages_.at(result.storage).claimed = scheduled != nullptr && scheduled->keep_from_start;
    storages_.settle(result.storage);
  }
}

// Called before an operator writes. If the operator is not in the schedule and writes to values that cannot be made
// again, the earlier values are lost, and everything that the schedule has dropped and would rebuild from the earlier
// values. Then rebuilds and keeps the dropped results.
void TapeWriter::save_from_write(const TapeOperator& record, const std::vector<at::Tensor>& written,
                                 const std::vector<at::Tensor>& statistics) {
  if (state_.cursor.schedule() == nullptr || (written.empty() && statistics.empty())) {
    return;
  }
  std::set<int> lost;
  const auto note = [&](int storage) {
    if (storages_.at(storage).is_external() || !storages_.at(storage).is_rebuildable) {
      lost.insert(storage);
    }
  };
  std::vector<plan::Value> writes;
  for (const at::Tensor& tensor : written) {
    if (has_bytes(tensor)) {
      const int storage = storages_.number_of(tensor);
      const plan::Value value{storage, storages_.at(storage).last_version() + 1};
      if (std::find(writes.begin(), writes.end(), value) == writes.end()) {
        writes.push_back(value);
      }
      note(storage);
    }
  }
  for (const at::Tensor& tensor : statistics) {
    if (has_bytes(tensor)) {
      note(storages_.number_of(tensor));
    }
  }
  if (lost.empty()) {
    return;
  }
  const TapeSchedule::Made* due = state_.cursor.deviation().empty() ? state_.cursor.due(replays_.next()) : nullptr;
  for (size_t i = 0; due != nullptr && i < due->bytes.size(); ++i) {
    writes.push_back({storages_.size() + static_cast<int>(i), 0});
  }
  const bool is_due =
      due != nullptr && due->op == record.op.operator_name() && due->wiring == wiring_of(record.needs, writes);
  if (!is_due) {
    replays_.keep_what_depends_on(lost);
  }
}

}  // namespace snug::detail
