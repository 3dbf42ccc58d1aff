#include "snug/activations/detail/op_tape.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>

#include "snug/activations/detail/operator_traits.h"
#include "snug/activations/detail/storage_views.h"
#include "snug/activations/detail/tape_slot.h"
#include "snug/activations/detail/tensor_hash.h"

// Recording. What is rebuilt, and when, is in op_tape_replay.cpp.

namespace snug::detail {
namespace {

const c10::StorageImpl* name_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

// A shorter last batch may take less than was planned for, not more.
bool fits(const std::vector<int64_t>& bytes, const std::vector<int64_t>& planned) {
  return std::equal(bytes.begin(), bytes.end(), planned.begin(), planned.end(), std::less_equal<>());
}

}  // namespace

OpTape::OpTape(std::shared_ptr<const TapeSchedule> schedule, TapeListener* listener)
    : schedule_(std::move(schedule)),
      store_(schedule_ ? schedule_->store : nullptr),
      listener_(listener),
      deviates_from_(schedule_ ? std::numeric_limits<int>::max() : 0),
      arrived_(schedule_ ? schedule_->unpackings.size() : 0, false) {
  if (schedule_) {
    storages_.reserve(schedule_->storages.size());
    operators_.reserve(schedule_->operators.size());
  }
}

void OpTape::call(const OperatorCall& call, Stack& stack) {
  std::unique_lock lock(mutex_);
  if (is_closed_ || traits_of(call.op).is_view) {
    lock.unlock();
    call.proceed(stack);
    return;
  }
  const size_t first_result = stack.size() - call.op.schema().arguments().size();
  TapeOperator record = read_arguments(call, stack);
  if (listener_ != nullptr) {
    listener_->before_operator();
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
  const auto made = read_results(record, stack, first_result);
  if (record.results.empty() && record.writes.empty()) {
    if (listener_ != nullptr) {
      listener_->after_view();
    }
    return;
  }
  judge(record);
  follow_schedule(record);
  if (listener_ != nullptr) {
    tell(record, made);
  }
  operators_.push_back(std::move(record));
}

int OpTape::number_of(const at::Tensor& tensor) {
  const auto found = numbers_.find(name_of(tensor));
  return found != numbers_.end() ? found->second : add_storage(tensor, /*is_external=*/true, -1);
}

int OpTape::add_storage(const at::Tensor& tensor, bool is_external, int producer) {
  const int number = static_cast<int>(storages_.size());
  TapeStorage& storage = storages_.emplace_back();
  storage.is_external = is_external;
  storage.producers.push_back(producer);
  storage.bytes = static_cast<int64_t>(tensor.storage().nbytes());
  storage.where.emplace(tensor.storage().getWeakStorageImpl());  // its address is not given to another
  if (is_external) {
    storage.held = tensor.storage();
  }
  if (!tensor.is_inference()) {
    storage.counter = tensor.unsafeGetTensorImpl()->version_counter();
  }
  numbers_.emplace(name_of(tensor), number);
  if (listener_ != nullptr) {
    listener_->on_storage(number, storage.bytes, is_external);
  }
  return number;
}

TapeOperator OpTape::read_arguments(const OperatorCall& call, Stack& stack) {
  TapeOperator record{call.op, call.context()};
  const OperatorTraits& traits = traits_of(call.op);
  const Arguments arguments(call.op, stack);
  record.is_replayable = !traits.is_collective;
  record.arguments.assign(arguments.begin(), arguments.end());
  const std::vector<size_t> written = traits.written_by(arguments);
  const auto is_among = [](const std::vector<size_t>& list, size_t i) {
    return std::find(list.begin(), list.end(), i) != list.end();
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_among(traits.statistics, i) && is_among(written, i)) {
      // What batch normalisation returns does not depend on the statistics that it moves.
      record.arguments[i] = {};
      visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) { unseen_write(tensor); });
    } else if (arguments[i].isTensor()) {
      record.arguments[i] = {};
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
    }
  }
  call.random.is_noted = call.random.is_noted || traits.draws(arguments);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (traits.is_collective || (is_among(written, i) && !is_among(traits.statistics, i))) {
      visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) { note_write(record, tensor); });
    }
  }
  return record;
}

void OpTape::read_tensor(TapeOperator& record, const at::Tensor& tensor, size_t argument,
                         std::optional<size_t> element) {
  if (!tensor.has_storage() || tensor.is_inference()) {
    record.is_replayable = false;
    return;
  }
  const int number = number_of(tensor);
  const ValueId value{number, at(number).last_version()};
  record.operands.push_back({argument, element, value, without_memory(tensor)});
  if (std::find(record.needs.begin(), record.needs.end(), value) == record.needs.end()) {
    record.needs.push_back(value);
  }
}

void OpTape::note_write(TapeOperator& record, const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    record.is_replayable = false;
    return;
  }
  const int number = number_of(tensor);
  TapeStorage& storage = at(number);
  if (std::any_of(record.writes.begin(), record.writes.end(), [&](ValueId v) { return v.storage == number; })) {
    return;
  }
  if (storage.is_external) {
    record.is_replayable = false;
    if (listener_ != nullptr) {
      listener_->before_outside_write(tensor);
    }
  }
  storage.producers.push_back(static_cast<int>(operators_.size()));
  record.writes.push_back({number, storage.last_version()});
}

// An operator that threw has written nothing.
void OpTape::take_back_writes(const TapeOperator& record) {
  for (const ValueId& value : record.writes) {
    at(value.storage).producers.pop_back();
  }
  if (listener_ != nullptr) {
    listener_->after_view();
  }
}

void OpTape::unseen_write(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (is_closed_ || !tensor.defined() || !tensor.has_storage()) {
    return;
  }
  const int number = number_of(tensor);
  TapeStorage& storage = at(number);
  storage.producers.push_back(-1);
  storage.is_rebuildable = storage.is_external;
  if (listener_ != nullptr) {
    if (storage.is_external) {
      listener_->before_outside_write(tensor);
    }
    listener_->before_operator();
    listener_->after_operator(
        {.name = std::string(kOtherWrite), .writes = {{number, storage.last_version()}}, .replayable = false}, {});
  }
}

std::vector<std::pair<int, const void*>> OpTape::read_results(TapeOperator& record, const Stack& stack,
                                                              size_t first_result) {
  std::vector<std::pair<int, const void*>> made;
  const auto read = [&](const at::Tensor& tensor, size_t result, std::optional<size_t> element) {
    if (!tensor.defined() || (tensor.has_storage() && numbers_.count(name_of(tensor)) > 0)) {
      return;
    }
    if (!tensor.has_storage() || tensor.is_inference()) {
      record.is_replayable = false;
      return;
    }
    const int number = add_storage(tensor, /*is_external=*/false, static_cast<int>(operators_.size()));
    record.results.push_back({result, element, number});
    record.writes.push_back({number, 0});
    made.emplace_back(number, tensor.storage().data());
    // In a backward pass autograd writes gradients in place if nobody else holds them, and so must not find them held.
    if (listener_ != nullptr || goes_away(number) || torch::autograd::get_current_graph_task_id() >= 0) {
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

// Whether what it wrote can be made again, from what the schedule keeps and what can itself be made again.
void OpTape::judge(const TapeOperator& record) {
  const bool can_be =
      record.is_replayable && std::all_of(record.needs.begin(), record.needs.end(), [&](ValueId value) {
        const TapeStorage& storage = at(value.storage);
        return storage.is_external || storage.is_rebuildable || storage.claimed || goes_away(value.storage);
      });
  for (const ValueId& value : record.writes) {
    TapeStorage& storage = at(value.storage);
    const auto impl = value.version > 0 && !storage.is_external ? storage.where->lock() : nullptr;
    const bool was_resized = impl && static_cast<int64_t>(impl->nbytes()) != storage.bytes;
    const bool was_pinned = value.storage < deviates_from_ && schedule_ != nullptr &&
                            static_cast<size_t>(value.storage) < schedule_->storages.size() &&
                            schedule_->storages[static_cast<size_t>(value.storage)].is_pinned;
    storage.is_pinned = storage.is_pinned || was_resized || was_pinned;
    storage.is_rebuildable = can_be && !storage.is_pinned;
    if (was_resized) {
      storage.bytes = static_cast<int64_t>(impl->nbytes());
      if (listener_ != nullptr || goes_away(value.storage)) {
        watch(value.storage, *impl);
      }
      if (listener_ != nullptr) {
        listener_->on_resized(value.storage);
      }
    }
    if (drops_everything_ && !storage.is_rebuildable && store_ == nullptr) {
      storage.claimed = true;  // so that what is made of it can be rebuilt
      settle(value.storage);
    }
  }
}

void OpTape::follow_schedule(const TapeOperator& record) {
  if (!schedule_ || !deviation_.empty()) {
    return;
  }
  const size_t k = operators_.size();
  const TapeSchedule::Made* due = k < schedule_->operators.size() ? &schedule_->operators[k] : nullptr;
  const int first = record.results.empty() ? -1 : record.results.front().storage;
  std::vector<int64_t> bytes;
  for (const auto& result : record.results) {
    bytes.push_back(at(result.storage).bytes);
  }
  const bool is_due = due != nullptr && due->op == record.op.operator_name() && fits(bytes, due->bytes);
  if (!is_due || due->wiring != wiring_of(record.needs, record.writes)) {
    deviates_from_ = first >= 0 ? first : static_cast<int>(storages_.size());
    deviation_ = fmt::format(
        "operator {} is {} ({} bytes) and was {}", k, c10::toString(record.op.operator_name()), fmt::join(bytes, " + "),
        due == nullptr ? "none" : fmt::format("{} ({} bytes)", c10::toString(due->op), fmt::join(due->bytes, " + ")));
    deviation_ += is_due ? ", on other operands" : "";
    return;
  }
  for (const auto& result : record.results) {
    at(result.storage).claimed = schedule_->storages[static_cast<size_t>(result.storage)].keep_from_start;
    settle(result.storage);
  }
}

void OpTape::tell(const TapeOperator& record, const std::vector<std::pair<int, const void*>>& made) {
  ProfiledOperator op{
      .name = c10::toString(record.op.operator_name()), .writes = record.writes, .replayable = record.is_replayable};
  for (const ValueId& value : record.needs) {
    const bool is_written = std::any_of(record.writes.begin(), record.writes.end(),
                                        [&](ValueId write) { return write.storage == value.storage; });
    if (!is_written) {
      op.reads.push_back(value);
    }
  }
  listener_->after_operator(std::move(op), made);
}

// The memory of a storage that is watched goes back to the tape when the last tensor on it is gone.
struct OpTape::Watch {
  std::weak_ptr<OpTape> tape;
  int storage;
  c10::DataPtr data;

  static void release(void* context) {
    const std::unique_ptr<Watch> watch(static_cast<Watch*>(context));
    if (const auto tape = watch->tape.lock()) {
      tape->dropped(watch->storage, std::move(watch->data));
    }
  }
};

void OpTape::watch(int storage, c10::StorageImpl& impl) {
  c10::DataPtr data = impl.set_data_ptr(c10::DataPtr());
  void* const address = data.get();
  const c10::Device device = data.device();
  auto watch = std::make_unique<Watch>(weak_from_this(), storage, std::move(data));
  impl.set_data_ptr_noswap({address, watch.release(), &Watch::release, device});
  at(storage).is_watched = true;
}

void OpTape::dropped(int storage, c10::DataPtr data) {
  const std::lock_guard lock(mutex_);
  at(storage).is_watched = false;
  if (at(storage).where && at(storage).where->lock()) {
    return;  // it goes on with other memory
  }
  if (listener_ != nullptr) {
    if (std::exchange(at(storage).was_dropped, true)) {
      listener_->on_unused(storage);  // a backward pass inside the forward pass had it again
    } else {
      listener_->on_drop(storage);
    }
  }
  if (should_hold(storage) || goes_away(storage)) {
    at(storage).parked = std::move(data);
    settle(storage);
  } else if (verifies_ && data.device().is_cpu() && data.get() != nullptr) {
    std::memset(data.get(), 0xFF,
                static_cast<size_t>(at(storage).bytes));  // so that nobody finds the old values by luck
  }
}

std::any OpTape::pack(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (is_closed_ && torch::autograd::get_current_graph_task_id() < 0 && deviation_.empty()) {
    deviation_ = "the forward pass went on after a backward pass had begun; make a Rematerialize for each forward pass";
  }
  if (is_closed_ || !tensor.has_storage()) {
    return tensor.detach();
  }
  const auto found = numbers_.find(name_of(tensor));
  if (found == numbers_.end() || at(found->second).is_external) {
    return tensor.detach();
  }
  auto slot = std::make_shared<Slot>(shared_from_this(), found->second, without_memory(tensor));
  ++at(slot->storage).slots;
  if (listener_ != nullptr) {
    listener_->on_pack(slot->storage);
  }
  settle(slot->storage);
  if (should_hold(slot->storage)) {
    mark_as_saved(tensor);
  }
  if (verifies_ && !is_workspace_of(slot->storage, tensor)) {
    slot->values = tensor_hash(tensor);
  }
  return slot;
}

bool OpTape::is_workspace_of(int storage, const at::Tensor& tensor) const {
  const int producer = storages_[static_cast<size_t>(storage)].producers.front();
  return producer >= 0 && is_workspace(operators_[static_cast<size_t>(producer)].op, tensor);
}

void OpTape::close() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_closed_, true)) {
    return;
  }
  numbers_.clear();
  for (int s = 0; s < static_cast<int>(storages_.size()); ++s) {
    TapeStorage& storage = at(s);
    storage.version_at_end = storage.counter ? storage.counter->current_version() : 0;
    const bool is_scheduled = s < deviates_from_;
    storage.claimed = storage.claimed && is_scheduled && schedule_->storages[static_cast<size_t>(s)].needed_until >= 0;
    settle(s);
  }
}

void OpTape::forget_listener() {
  const std::lock_guard lock(mutex_);
  listener_ = nullptr;
}

}  // namespace snug::detail
