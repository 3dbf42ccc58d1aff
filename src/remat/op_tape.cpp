#include "src/remat/op_tape.h"

#include <mutex>
#include <optional>
#include <utility>

#include "snug/state.h"
#include "src/activations/operator_traits.h"

// The essay is on top of op_tape.h. Here is the way of an operator through the parts, and the end of each pass.

namespace snug::detail {

OpTape::OpTape(std::shared_ptr<TapeState> state)
    : state_(std::move(state)),
      storages_(std::make_shared<TapeStorages>(state_)),
      replays_(*state_, *storages_),
      writer_(*state_, *storages_, replays_) {}

OpTape::OpTape(std::shared_ptr<const TapeSchedule> schedule, TapeListener* listener)
    : OpTape(std::make_shared<TapeState>(std::move(schedule))) {
  state_->listener = listener != nullptr ? listener : &state_->nobody;
}

OpTape::OpTape(TapeRegion region) : OpTape(std::make_shared<TapeState>(nullptr)) { state_->region = std::move(region); }

// --- operators

void OpTape::call(const OperatorCall& call, Stack& stack) {
  c10::SmallVector<c10::Storage, 4> operands;  // alive until the listener has heard of the operator
  const OperatorTraits& traits = traits_of(call.op);
  std::unique_lock lock(state_->mutex);
  if (state_->is_closed || traits.is_view) {
    lock.unlock();
    call.proceed(stack);
    return;
  }
  std::optional<TapeWorks> works(std::in_place, state_->listener);
  storages_->finish_transfers_before(replays_.next());
  RunningOperator running = writer_.begin(call, traits, stack);
  TapeOperator& record = running.record;
  for (const TapeOperator::Operand& operand : record.operands) {
    if (storages_->at(operand.value.storage).is_watched) {
      operands.push_back(storages_->at(operand.value.storage).holding.find());
    }
  }
  state_->listener->before_operator();
  std::optional<RngState> generators;  // of a library's operator, which may draw without a sign of it
  if (state_->region && !call.op.schema().name().starts_with("aten::")) {
    generators = RngState::capture();
  }
  works.reset();
  lock.unlock();
  try {
    call.proceed(stack);
  } catch (...) {
    lock.lock();
    writer_.take_back(running);
    throw;
  }
  lock.lock();
  works.emplace(state_->listener);
  if (call.random.is_noted) {
    record.drew_from = call.random.before;
    record.is_safe = true;
    record.is_replayable = record.is_replayable && record.drew_from.defined() && draws_the_same_again(call.op);
  }
  if (generators && !generators->is_current()) {
    record.is_replayable = false;
  }
  writer_.read_results(running, stack);
  if (record.results.empty() && record.writes.empty()) {
    state_->listener->after_view();
    return;
  }
  writer_.follow_schedule(record);
  replays_.judge(running);
  hash_what_was_filled();
  if (state_->has_listener()) {
    writer_.tell_listener(running);
  }
  replays_.add(std::move(record));
}

void OpTape::unseen_write(const at::Tensor& tensor) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->is_closed) {
    writer_.note_unseen_write_to(tensor);
  }
}

void OpTape::before_unseen_write(const at::Tensor& tensor) {
  const std::lock_guard lock(state_->mutex);
  if (state_->is_closed) {
    return;
  }
  if (state_->region) {
    storages_->copy_before_write(tensor);
  } else if (const std::optional<int> known = storages_->known_number_of(tensor)) {
    replays_.keep_evicted_before_write(*known);
  }
}

void OpTape::was_switched_off() {
  const std::lock_guard lock(state_->mutex);
  missed_operators_ = true;
  if (state_->cursor.deviation().empty()) {
    state_->cursor.deviate(
        "another library switched DispatchKey::Fake off in the forward pass, so operators went unseen");
  }
}

int64_t OpTape::evict(int64_t bytes) {
  // Another thread that uses the tape may want a lock that this thread has, such as Python's.
  const std::unique_lock lock(state_->mutex, std::try_to_lock);
  if (!lock.owns_lock()) {
    return 0;
  }
  const bool is_trial = state_->has_listener() || state_->verifies;
  const TapeSchedule* schedule = state_->cursor.schedule();
  return is_trial || schedule == nullptr || !schedule->device.is_cpu() ? 0 : replays_.evict(bytes);
}

// --- passes

void OpTape::keep_outside(const at::Tensor& tensor, const std::shared_ptr<SavedTensorPolicy>& policy) {
  const std::lock_guard lock(state_->mutex);
  storages_->keep_outside(tensor, policy);
}

void OpTape::close() {
  const std::lock_guard lock(state_->mutex);
  if (std::exchange(state_->is_closed, true)) {
    return;
  }
  storages_->forget_numbers();
  replays_.note_all_unseen_writes();
  for (int s = 0; s < storages_->size(); ++s) {
    TapeStorage& storage = storages_->at(s);
    const TapeSchedule::ForStorage* scheduled = state_->cursor.of(s);
    storage.claimed = storage.claimed &&
                      (state_->region ? !storage.is_rebuildable : scheduled != nullptr && scheduled->needed_until >= 0);
    storages_->settle(s);
  }
  if (state_->region) {
    replays_.forget_what_is_unneeded();
  }
}

// Storages with a graph that is still alive are unused from here on. The program, or a hook that goes backward, has
// kept the graph.
void OpTape::backward_is_over() {
  const std::lock_guard lock(state_->mutex);
  for (int s = 0; s < storages_->size(); ++s) {
    if (storages_->at(s).slots > 0) {
      state_->listener->on_unused(s);
    }
  }
}

void OpTape::note_writes_in_backward() {
  const std::lock_guard lock(state_->mutex);
  for (int s = 0; s < storages_->size(); ++s) {
    if (storages_->at(s).is_external() && storages_->at(s).was_written_unseen()) {
      written_in_backward_.insert(s);
    }
  }
}

void OpTape::forget_listener() {
  const std::lock_guard lock(state_->mutex);
  state_->listener = &state_->nobody;
}

std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> OpTape::made_and_alive() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> result;
  for (int s = 0; s < storages_->size(); ++s) {
    const TapeStorage& storage = storages_->at(s);
    if (const c10::Storage memory = storage.is_external() ? c10::Storage() : storage.holding.find()) {
      result.push_back(memory.getWeakStorageImpl());
    }
  }
  return result;
}

}  // namespace snug::detail
