#include "src/remat/op_tape.h"

#include <algorithm>
#include <utility>

#include <c10/util/SmallVector.h>

#include "snug/state.h"
#include "src/activations/operator_traits.h"
#include "src/core/has_bytes.h"
#include "src/memory/backward_pass.h"

// How the tape records an operator
//
// The class's essay is on top of op_tape.h. Here is the record of one operator: operands, writes and results. The other
// parts of OpTape are in
// - op_tape_schedule.cpp: comparing operators with the schedule;
// - op_tape_holding.cpp: which of program, tape and store owns a storage;
// - op_tape_streams.cpp: device streams that use a storage;
// - op_tape_saved.cpp: tensors saved by autograd;
// - op_tape_replay.cpp: operators that run again;
// - op_tape_region.cpp: checkpointed regions.
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

namespace snug::detail {
namespace {

const c10::StorageImpl* name_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// Arguments that are storages without a tensor, as for set_().
auto given_as_such(const Arguments& arguments) {
  c10::SmallVector<const c10::StorageImpl*, 1> given;
  for (const c10::IValue& argument : arguments) {
    if (argument.isStorage()) {
      given.push_back(argument.toStorage().unsafeGetStorageImpl());
    }
  }
  return given;
}

}  // namespace

OpTape::OpTape(std::shared_ptr<const TapeSchedule> schedule, TapeListener* listener)
    : cursor_(std::move(schedule)), listener_(listener) {
  if (cursor_.schedule() != nullptr) {
    store_ = cursor_.schedule()->store;
    storages_.reserve(cursor_.schedule()->storages.size());
    operators_.reserve(cursor_.schedule()->operators.size());
    numbers_.reserve(cursor_.schedule()->storages.size());
  }
}

void OpTape::call(const OperatorCall& call, Stack& stack) {
  c10::SmallVector<c10::Storage, 4> operands;  // alive until the listener has heard of the operator
  std::unique_lock lock(mutex_);
  if (is_closed_ || traits_of(call.op).is_view) {
    lock.unlock();
    call.proceed(stack);
    return;
  }
  meet_streams_before(operators_.size());
  const size_t first_result = stack.size() - call.op.schema().arguments().size();
  const Memories given = given_as_such(Arguments(call.op, stack));
  TapeOperator record = read_arguments(call, stack);
  note_streams(record, traits_of(call.op).stream);
  for (const TapeOperator::Operand& operand : record.operands) {
    if (at(operand.value.storage).is_watched) {
      operands.push_back(at(operand.value.storage).holding.find());
    }
  }
  if (listener_ != nullptr) {
    listener_->before_operator();
  }
  std::optional<RngState> generators;  // of a library's operator, which may draw without a sign of it
  if (region_ && !call.op.schema().name().starts_with("aten::")) {
    generators = RngState::capture();
  }
  lock.unlock();
  try {
    call.proceed(stack);
  } catch (...) {
    lock.lock();
    take_back_writes(record);
    throw;
  }
  lock.lock();
  if (call.random.is_noted) {
    record.drew_from = call.random.before;
    record.is_replayable = record.is_replayable && record.drew_from.defined() && draws_the_same_again(call.op);
  }
  if (generators && !generators->is_current()) {
    record.is_replayable = false;
  }
  const auto made = read_results(record, given, stack, first_result);
  if (record.results.empty() && record.writes.empty()) {
    if (listener_ != nullptr) {
      listener_->after_view();
    }
    return;
  }
  follow_schedule(record);
  judge(record);
  hash_what_was_filled();
  if (listener_ != nullptr) {
    tell(record, made);
  }
  operators_.push_back(std::move(record));
}

// Null: no operator has seen the tensor's storage.
std::optional<int> OpTape::known_number_of(const at::Tensor& tensor) const {
  const auto found = has_bytes(tensor) ? numbers_.find(name_of(tensor)) : numbers_.end();
  return found != numbers_.end() ? std::optional(found->second) : std::nullopt;
}

int OpTape::number_of(const at::Tensor& tensor) {
  const std::optional<int> known = known_number_of(tensor);
  return known ? *known : add_storage(tensor, -1);
}

int OpTape::add_storage(const at::Tensor& tensor, int producer) {
  const int number = static_cast<int>(storages_.size());
  TapeStorage& storage = storages_.emplace_back(TapeStorage{
      .origin = producer >= 0     ? TapeStorage::Origin::Operator
                : is_lent(tensor) ? TapeStorage::Origin::Lent
                                  : TapeStorage::Origin::Program,
      .is_counted = cursor_.counts(tensor.device()) && is_from_allocator(tensor.storage().data_ptr()),
      .producers = {producer},
      .bytes = static_cast<int64_t>(tensor.storage().nbytes()),
      .holding = Holding(tensor.storage()),
  });
  if (storage.origin == TapeStorage::Origin::Program) {
    if (region_) {
      pack_outside(number, tensor);
    } else {
      storage.holding.hold(tensor.storage());
    }
  }
  storage.counts.emplace_back(tensor);
  begin_streams(number, tensor.storage());
  numbers_.emplace(name_of(tensor), number);
  if (listener_ != nullptr) {
    listener_->on_storage(number, storage.bytes, storage.is_external());
  }
  return number;
}

TapeOperator OpTape::read_arguments(const OperatorCall& call, Stack& stack) {
  TapeOperator record{call.op, call.context()};
  const OperatorTraits& traits = traits_of(call.op);
  const Arguments arguments(call.op, stack);
  record.is_replayable = !traits.is_collective && !traits.draws_from_own_state(arguments);
  record.reads_batch_statistics = traits.reads_batch_statistics(arguments);
  record.arguments.resize(arguments.size());
  const auto is_statistic = [&](size_t i) {
    return std::find(traits.statistics.begin(), traits.statistics.end(), i) != traits.statistics.end();
  };
  std::vector<at::Tensor> statistics, written;
  visit_written(traits, arguments, [&](const at::Tensor& tensor, size_t i) {
    (is_statistic(i) ? statistics : written).push_back(tensor);
  });
  for (const c10::IValue& argument : arguments) {  // all arguments, before the first is read: some may share a storage
    visit_tensors_in(argument, [&](const at::Tensor& tensor) {
      if (const std::optional<int> known = known_number_of(tensor)) {
        note_write_through_pointer(*known, tensor);
      }
    });
  }
  if (region_) {
    prepare_operands(record, traits, arguments);
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_statistic(i) && !statistics.empty()) {
      continue;  // the results of batch normalisation do not depend on the statistics that are moved
    }
    if (arguments[i].isTensor()) {
      if (arguments[i].toTensor().defined()) {
        read_tensor(record, arguments[i].toTensor(), i, std::nullopt);
      } else {
        record.arguments[i] = at::Tensor();
      }
    } else if (arguments[i].isTensorList() || arguments[i].isOptionalTensorList()) {
      c10::List<c10::IValue> list = arguments[i].toList().copy();
      for (size_t k = 0; k < list.size(); ++k) {
        const c10::IValue element = list.get(k);
        if (element.isTensor() && element.toTensor().defined()) {
          read_tensor(record, element.toTensor(), i, k);
          list.set(k, at::Tensor());
        }
      }
      record.arguments[i] = list;
    } else if (arguments[i].isStorage()) {  // the tape cannot tell who holds the storage
      record.is_replayable = false;
    } else {
      record.arguments[i] = arguments[i];
    }
  }
  call.random.is_noted = call.random.is_noted || traits.draws(arguments);
  save_from_write(record, written, statistics);
  if (region_) {
    save_from_write_in_region(written);
    save_from_write_in_region(statistics);
  }
  for (const at::Tensor& tensor : statistics) {
    unseen_write(tensor);
  }
  for (const at::Tensor& tensor : written) {
    note_write(record, tensor);
  }
  expect_writes(written);
  return record;
}

void OpTape::read_tensor(TapeOperator& record, const at::Tensor& tensor, size_t argument,
                         std::optional<size_t> element) {
  if (!has_bytes(tensor) || tensor.is_inference()) {
    record.is_replayable = false;
    return;
  }
  if (region_ && !element && traits_of(record.op).reads_no_values) {
    record.arguments[argument] = shapes_.of(tensor);
    return;
  }
  const int number = number_of(tensor);
  record.is_replayable = record.is_replayable && !at(number).is_lent();
  const plan::Value value{number, at(number).last_version()};
  record.operands.push_back({argument, element, value, shapes_.of(tensor)});
  if (std::find(record.needs.begin(), record.needs.end(), value) == record.needs.end()) {
    record.needs.push_back(value);
  }
}

void OpTape::note_write(TapeOperator& record, const at::Tensor& tensor) {
  if (!has_bytes(tensor)) {
    record.is_replayable = false;
    return;
  }
  const int number = number_of(tensor);
  TapeStorage& storage = at(number);
  if (std::any_of(record.writes.begin(), record.writes.end(), [&](plan::Value v) { return v.storage == number; })) {
    return;
  }
  if (storage.is_external()) {
    record.is_replayable = false;
  }
  storage.producers.push_back(static_cast<int>(operators_.size()));
  record.writes.push_back({number, storage.last_version()});
}

// The write count of a tensor. On memory made by operators, a counter that is new to the tape has counted nothing.
WriteCount& OpTape::count_of(int storage, const at::Tensor& tensor) {
  auto& counts = at(storage).counts;
  const auto found =
      std::find_if(counts.begin(), counts.end(),
                   [counter = WriteCount::counter_of(tensor)](const WriteCount& c) { return c.counter() == counter; });
  if (found != counts.end()) {
    return *found;
  }
  return at(storage).is_external() ? counts.emplace_back(tensor) : counts.emplace_back(tensor, 0);
}

// Autograd counts each of the arguments, or none of the arguments, after the operator.
void OpTape::expect_writes(const std::vector<at::Tensor>& written) {
  std::vector<const void*> counters;
  for (const at::Tensor& tensor : written) {
    if (has_bytes(tensor) && !tensor.is_inference()) {
      counters.push_back(WriteCount::counter_of(tensor));
      const auto writes = std::count(counters.begin(), counters.end(), counters.back());
      count_of(number_of(tensor), tensor).expect(static_cast<uint32_t>(writes));
    }
  }
}

// Finds writes since the tensor was last seen that no operator made. The written values are not made again.
void OpTape::note_write_through_pointer(int storage, const at::Tensor& tensor) {
  WriteCount& count = count_of(storage, tensor);
  if (count.moved()) {
    count.accept();
    note_unseen_write(storage);
  }
}

// An operator that threw has written nothing.
void OpTape::take_back_writes(const TapeOperator& record) {
  for (const plan::Value& value : record.writes) {
    at(value.storage).producers.pop_back();
    for (WriteCount& count : at(value.storage).counts) {
      if (!count.moved()) {
        count.accept();  // expects no write any more
      }
    }
  }
  if (listener_ != nullptr) {
    listener_->after_view();
  }
}

void OpTape::unseen_write(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (is_closed_ || !has_bytes(tensor)) {
    return;
  }
  const int number = number_of(tensor);
  count_of(number, tensor).expect();
  note_unseen_write(number);
}

void OpTape::was_switched_off() {
  const std::lock_guard lock(mutex_);
  missed_operators_ = true;
  if (deviation().empty()) {
    cursor_.deviate("another library switched DispatchKey::Fake off in the forward pass, so operators went unseen");
  }
}

void OpTape::note_unseen_write(int storage) {
  TapeStorage& s = at(storage);
  const bool is_lost = s.is_external() || !s.is_rebuildable;
  s.producers.push_back(-1);
  s.is_rebuildable = s.is_external();
  if (region_ && std::exchange(s.is_read, false) && is_lost) {
    keep_what_depends_on({storage});
  }
  if (listener_ != nullptr) {
    listener_->before_operator();
    listener_->after_operator(
        {.name = std::string(plan::kOtherWrite), .writes = {{storage, s.last_version()}}, .replayable = false}, {});
  }
}

// Notes a result on memory that the tape has a number for. The tensor may have moved onto the memory in this operator,
// as by set_(), and may bring a write count of the tensor's own.
void OpTape::note_alias(int storage, const at::Tensor& tensor, bool was_written) {
  auto& counts = at(storage).counts;
  const bool is_new = std::none_of(counts.begin(), counts.end(), [&](const WriteCount& count) {
    return count.counter() == WriteCount::counter_of(tensor);
  });
  if (is_new) {
    counts.emplace_back(tensor).expect(was_written ? 1 : 0);
  }
}

std::vector<std::pair<int, const void*>> OpTape::read_results(TapeOperator& record, const Memories& given,
                                                              const Stack& stack, size_t first_result) {
  std::vector<std::pair<int, const void*>> made;
  const bool has_written = !record.writes.empty();
  const auto read = [&](const at::Tensor& tensor, size_t result, std::optional<size_t> element) {
    if (!tensor.defined()) {
      return;
    }
    if (const std::optional<int> known = known_number_of(tensor)) {
      note_alias(*known, tensor, /*was_written=*/has_written);
      return;
    }
    if (!has_bytes(tensor) || tensor.is_inference()) {
      record.is_replayable = false;
      return;
    }
    if (std::ranges::find(given, tensor.storage().unsafeGetStorageImpl()) != given.end()) {
      at(add_storage(tensor, -1)).counts.back().expect(has_written ? 1 : 0);  // no operator has read the storage yet
      return;
    }
    const int number = add_storage(tensor, static_cast<int>(operators_.size()));
    record.results.push_back({result, element, number});
    record.writes.push_back({number, 0});
    if (region_) {
      treat_result(record, number);
    }
    if (listener_ != nullptr) {
      made.emplace_back(number, tensor.storage().data());
    }
    // In a backward pass, autograd writes gradients in place if nobody else holds the gradients. A watch does not count
    // as a holder, so backward results are watched and not held.
    if (listener_ != nullptr || goes_away(number) || current_pass() >= 0) {
      watch(number, *tensor.storage().unsafeGetStorageImpl());
    }
  };
  for (size_t i = first_result; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      read(stack[i].toTensor(), i - first_result, std::nullopt);
    } else if (stack[i].isTensorList()) {
      const auto list = stack[i].toTensorVector();
      for (size_t k = 0; k < list.size(); ++k) {
        read(list[k], i - first_result, k);
      }
    }
  }
  return made;
}

void OpTape::tell(const TapeOperator& record, const std::vector<std::pair<int, const void*>>& made) {
  plan::Operator op{.name = c10::toString(record.op.operator_name()),
                    .writes = {record.writes.begin(), record.writes.end()},
                    .replayable = record.is_replayable,
                    .reads_batch_statistics = record.reads_batch_statistics};
  for (const plan::Value& value : record.needs) {
    const bool is_written = std::any_of(record.writes.begin(), record.writes.end(),
                                        [&](plan::Value write) { return write.storage == value.storage; });
    if (!is_written) {
      op.reads.push_back(value);
    }
  }
  listener_->after_operator(std::move(op), made);
}

void OpTape::forget_listener() {
  const std::lock_guard lock(mutex_);
  listener_ = nullptr;
}

}  // namespace snug::detail
