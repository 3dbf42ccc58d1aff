#include "src/remat/tape_writer.h"

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "src/core/has_bytes.h"
#include "src/memory/backward_pass.h"
#include "src/memory/held.h"

// How the tape records an operator: operands, writes and results
//
// Problem: a record must name operands by value and must not keep the values alive. Tensors are also written by code
// without operators: custom functions write through pointers.
//
// Choice: an operand is a (storage, version) and a shape without memory. Each storage has the write counts of all
// tensors seen on the storage. An operator announces the operator's own writes to the counts before the kernel runs. A
// count that moved further shows an unseen write, and unseen versions have no producer.
//
// Consequence: all arguments are checked for unseen writes before one argument is read, because arguments may share a
// storage.

// How the tape compares an operator with the schedule
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

RunningOperator TapeWriter::begin(const OperatorCall& call, const OperatorTraits& traits, Stack& stack) {
  const Arguments arguments(call.op, stack);
  RunningOperator running{.record = {call.op, call.context()},
                          .traits = traits,
                          .first_result = stack.size() - arguments.size(),
                          .reads_batch_statistics = traits.reads_batch_statistics(arguments)};
  TapeOperator& record = running.record;
  record.is_replayable = !traits.is_collective && !traits.draws_from_own_state(arguments);
  record.arguments.resize(arguments.size());
  Tensors statistics, written;
  visit_written(traits, arguments, [&](const at::Tensor& tensor, size_t i) {
    (traits.is_statistic(i) ? statistics : written).push_back(tensor);
  });
  for (const c10::IValue& argument : arguments) {  // all arguments, before the first is read: some may share a storage
    visit_tensors_in(argument, [&](const at::Tensor& tensor) {
      if (const std::optional<int> known = storages_.known_number_of(tensor)) {
        replays_.note_write_through_pointer(*known, tensor);
      }
    });
  }
  if (state_.region) {
    prepare_operands(running, arguments);
  }
  for (uint32_t i = 0; i < arguments.size(); ++i) {
    if (statistics.empty() || !traits.is_statistic(i)) {  // batch normalisation's results do not depend on moved ones
      read_argument(running, arguments[i], i);
    }
  }
  call.random.is_noted = call.random.is_noted || traits.draws(arguments);
  save_from_write(record, written, statistics);
  if (state_.region) {
    visit_written(traits, arguments, [&](const at::Tensor& tensor, size_t) { storages_.copy_before_write(tensor); });
  }
  for (const at::Tensor& tensor : statistics) {
    note_unseen_write_to(tensor);
  }
  for (const at::Tensor& tensor : written) {
    note_write(record, tensor);
  }
  expect_writes(written);
  const auto named = static_cast<size_t>(traits.stream);
  for (const TapeOperator::Operand& operand : record.operands) {
    storages_.note_stream(operand.value.storage,
                          traits.stream < 0 ? std::nullopt : std::optional(arguments[named].toStream()));
  }
  return running;
}

void TapeWriter::read_argument(RunningOperator& running, const c10::IValue& value, uint32_t argument) {
  TapeOperator& record = running.record;
  if (value.isTensor() && value.toTensor().defined()) {
    read_tensor(running, value.toTensor(), argument, std::nullopt);
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    c10::List<c10::IValue> list = value.toList().copy();
    for (uint32_t k = 0; k < list.size(); ++k) {
      const c10::IValue element = list.get(k);
      if (element.isTensor() && element.toTensor().defined()) {
        read_tensor(running, element.toTensor(), argument, k);
        list.set(k, at::Tensor());
      }
    }
    record.arguments[argument] = list;
  } else if (value.isStorage()) {  // the tape cannot tell who holds the storage
    record.is_replayable = false;
    running.given.push_back(value.toStorage().unsafeGetStorageImpl());
  } else {
    record.arguments[argument] = value;
  }
}

void TapeWriter::read_tensor(RunningOperator& running, const at::Tensor& tensor, uint32_t argument,
                             std::optional<uint32_t> element) {
  TapeOperator& record = running.record;
  if (!has_bytes(tensor) || tensor.is_inference()) {
    record.is_replayable = false;
    return;
  }
  record.is_safe = record.is_safe || (record.context.grad_mode && tensor.requires_grad());
  if (state_.region && !element && running.traits.reads_no_values) {
    record.arguments[argument] = shape_of(tensor);
    return;
  }
  const int number = storages_.number_of(tensor);
  const TapeStorage& storage = storages_.at(number);
  record.is_replayable = record.is_replayable && !storage.is_lent();
  const plan::Value value{number, storage.last_version()};
  record.operands.push_back({argument, element, value, shape_of(tensor)});
  if (std::find(record.needs.begin(), record.needs.end(), value) == record.needs.end()) {
    record.needs.push_back(value);
  }
}

void TapeWriter::note_write(TapeOperator& record, const at::Tensor& tensor) {
  if (!has_bytes(tensor)) {
    record.is_replayable = false;
    return;
  }
  const int number = storages_.number_of(tensor);
  TapeStorage& storage = storages_.at(number);
  if (std::ranges::find(record.writes, number, &plan::Value::storage) != record.writes.end()) {
    return;
  }
  record.is_replayable = record.is_replayable && !storage.is_external();
  storage.producers.push_back(replays_.next());
  record.writes.push_back({number, storage.last_version()});
}

// Autograd counts each of the arguments, or none of the arguments, after the operator.
void TapeWriter::expect_writes(const Tensors& written) {
  c10::SmallVector<const void*, 4> counters;
  for (const at::Tensor& tensor : written) {
    if (has_bytes(tensor) && !tensor.is_inference()) {
      counters.push_back(WriteCount::counter_of(tensor));
      const auto writes = std::count(counters.begin(), counters.end(), counters.back());
      storages_.at(storages_.number_of(tensor)).count_of(tensor).expect(static_cast<uint32_t>(writes));
    }
  }
}

// An operator that threw has written nothing.
void TapeWriter::take_back(const RunningOperator& running) {
  for (const plan::Value& value : running.record.writes) {
    storages_.at(value.storage).producers.pop_back();
    for (WriteCount& count : storages_.at(value.storage).counts) {
      if (!count.moved()) {
        count.accept();  // expects no write any more
      }
    }
  }
  state_.listener->after_view();
}

void TapeWriter::note_unseen_write_to(const at::Tensor& tensor) {
  if (!has_bytes(tensor)) {
    return;
  }
  const int number = storages_.number_of(tensor);
  storages_.at(number).count_of(tensor).expect();
  replays_.note_unseen_write(number);
}

void TapeWriter::read_results(RunningOperator& running, const Stack& stack) {
  TapeOperator& record = running.record;
  const bool has_written = !record.writes.empty();
  const auto read = [&](const at::Tensor& tensor, uint32_t result, std::optional<uint32_t> element) {
    if (!tensor.defined()) {
      return;
    }
    if (const std::optional<int> known = storages_.known_number_of(tensor)) {
      auto& counts = storages_.at(*known).counts;
      // The tensor may have moved onto the memory in this operator, as by set_(), with a write count of its own.
      if (std::ranges::find(counts, WriteCount::counter_of(tensor), &WriteCount::counter) == counts.end()) {
        counts.emplace_back(tensor).expect(has_written ? 1 : 0);
      }
      return;
    }
    if (!has_bytes(tensor) || tensor.is_inference()) {
      record.is_replayable = false;
      return;
    }
    if (std::ranges::find(running.given, tensor.storage().unsafeGetStorageImpl()) != running.given.end()) {
      const int number = storages_.add(tensor, -1);  // no operator has read the storage yet
      storages_.at(number).counts.back().expect(has_written ? 1 : 0);
      return;
    }
    const int number = storages_.add(tensor, replays_.next());
    record.results.push_back({result, element, number});
    record.writes.push_back({number, 0});
    if (state_.region) {
      storages_.at(number).is_blank = running.makes_blank;
      storages_.treat_result(number, running.treatment);
    }
    if (state_.has_listener()) {
      running.made.emplace_back(number, memory_of(tensor.storage()).get());
    }
    // In a backward pass, autograd writes gradients in place if nobody else holds the gradients. A watch does not count
    // as a holder, so backward results are watched and not held.
    if (state_.has_listener() || storages_.goes_away(number) || current_pass() >= 0) {
      storages_.watch(number, *tensor.storage().unsafeGetStorageImpl());
    }
  };
  for (size_t i = running.first_result; i < stack.size(); ++i) {
    const auto result = static_cast<uint32_t>(i - running.first_result);
    if (stack[i].isTensor()) {
      read(stack[i].toTensor(), result, std::nullopt);
    } else if (stack[i].isTensorList()) {
      const auto list = stack[i].toTensorVector();
      for (uint32_t k = 0; k < list.size(); ++k) {
        read(list[k], result, k);
      }
    }
  }
}

void TapeWriter::tell_listener(const RunningOperator& running) const {
  const TapeOperator& record = running.record;
  plan::Operator op{.name = c10::toString(record.op.operator_name()),
                    .writes = {record.writes.begin(), record.writes.end()},
                    .replayable = record.is_replayable,
                    .reads_batch_statistics = running.reads_batch_statistics};
  for (const plan::Value& value : record.needs) {
    if (std::ranges::find(record.writes, value.storage, &plan::Value::storage) == record.writes.end()) {
      op.reads.push_back(value);
    }
  }
  state_.listener->after_operator(std::move(op), running.made);
}

// --- the schedule

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
    return fmt::format("operator {} is {} ({} bytes) and was {}", k, c10::toString(record.op.operator_name()),
                       fmt::join(bytes, " + "),
                       due == nullptr ? "none" : fmt::format("{} ({} bytes)", due->name, fmt::join(due->bytes, " + ")));
  };
  const bool is_due = due != nullptr && due->op == record.op && due->bytes.size() == static_cast<size_t>(bytes.size());
  if (!is_due || due->wiring != wiring_of(record.needs, record.writes)) {
    state_.cursor.deviate(told() + (is_due ? ", on other operands" : ""), first >= 0 ? first : storages_.size());
    return;
  }
  const bool fits = std::ranges::equal(bytes, due->bytes, std::less_equal());  // a shorter last batch takes fewer bytes
  if (growth_.empty() && !fits) {
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
// values. Then rebuilds and keeps the dropped results. The schedule does not know of evicted results: after an eviction
// each operator counts as one that is not in the schedule.
void TapeWriter::save_from_write(const TapeOperator& record, const Tensors& written, const Tensors& statistics) {
  if (state_.cursor.schedule() == nullptr || (written.empty() && statistics.empty())) {
    return;
  }
  std::set<int> lost;
  const auto note = [&](int storage) {
    const TapeStorage& s = storages_.at(storage);
    if (s.is_external() || !s.is_rebuildable || s.is_source) {
      lost.insert(storage);
    }
  };
  c10::SmallVector<plan::Value, 2> writes;
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
  const bool is_due = due != nullptr && due->op == record.op && due->wiring == wiring_of(record.needs, writes);
  if (!is_due || storages_.has_evicted()) {
    replays_.keep_what_depends_on(lost);
  }
}

}  // namespace snug::detail
