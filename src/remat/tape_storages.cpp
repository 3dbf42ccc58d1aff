#include "src/remat/tape_storages.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/MapAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StreamGuard.h>

#include "src/activations/storage_views.h"
#include "src/core/has_bytes.h"
#include "src/memory/absent_storage.h"
#include "src/memory/operator_mode.h"
#include "src/planner/streams.h"

// Which of program, tape and store owns a storage
//
// Problem: dropping a storage too late costs memory, and too early costs a rebuild. The program tells nobody when the
// program drops a tensor.
//
// Options: counting references from outside sees a drop only at the next look, and cannot keep the bytes. Or the
// release of the memory itself is caught.
//
// Choice: the tape watches a storage by replacing the deleter of the storage's memory (Watch). When the last tensor is
// gone, the memory comes back to the tape. Then the tape parks the memory, puts a copy into the store, or lets the
// memory go. Holding has the states; should_hold(), is_kept() and goes_away() decide by the rules at the top of
// planner/simulator.cpp; settle() carries the decisions out.
//
// Consequence: settle() must follow each change of a fact that should_hold() reads. A failed write to the store never
// fails the step: the storage stays in memory.

namespace snug::detail {

TapeStorages::TapeStorages(std::shared_ptr<TapeState> state) : state_(std::move(state)) {
  if (const TapeSchedule* schedule = state_->cursor.schedule()) {
    store_ = schedule->store;
    storages_.reserve(schedule->storages.size());
    numbers_.reserve(schedule->storages.size());
  }
}

// --- numbers

std::optional<int> TapeStorages::known_number_of(const at::Tensor& tensor) const {
  const auto found = has_bytes(tensor) ? numbers_.find(tensor.storage().unsafeGetStorageImpl()) : numbers_.end();
  return found != numbers_.end() ? std::optional(found->second) : std::nullopt;
}

int TapeStorages::number_of(const at::Tensor& tensor) {
  const std::optional<int> known = known_number_of(tensor);
  return known ? *known : add(tensor, -1);
}

int TapeStorages::add(const at::Tensor& tensor, int producer) {
  const int number = size();
  TapeStorage& storage = storages_.emplace_back(tensor.storage());
  storage.origin = producer >= 0     ? TapeStorage::Origin::Operator
                   : is_lent(tensor) ? TapeStorage::Origin::Lent
                                     : TapeStorage::Origin::Program;
  storage.is_counted = state_->cursor.counts(tensor.device()) && is_from_allocator(memory_of(tensor.storage()));
  storage.producers.push_back(producer);
  if (storage.origin == TapeStorage::Origin::Program) {
    if (state_->region) {
      pack_outside(number, tensor);
    } else {
      storage.holding.hold(tensor.storage());
    }
  }
  storage.counts.emplace_back(tensor);
  begin_streams(number, tensor.storage());
  numbers_.emplace(tensor.storage().unsafeGetStorageImpl(), number);
  state_->listener->on_storage(number, storage.bytes, storage.is_external());
  return number;
}

// --- owners

// Returns the memory of a watched storage to the tape when the last tensor on the storage is gone.
struct TapeStorages::Watch {
  std::weak_ptr<TapeStorages> storages;
  int storage;
  c10::DataPtr data;

  static void release(void* context) {
    const std::unique_ptr<Watch> watch(static_cast<Watch*>(context));
    if (const auto storages = watch->storages.lock()) {
      storages->dropped(watch->storage, std::move(watch->data));
    }
  }
};

// The memory under the watches of all tapes.
const c10::DataPtr& TapeStorages::allocated(const c10::DataPtr& memory) {
  const bool is_watched = memory.get_deleter() == &Watch::release;
  return is_watched ? allocated(static_cast<const Watch*>(memory.get_context())->data) : memory;
}

// Whether the device's allocator gave the memory, as far as a deleter shows.
bool TapeStorages::is_from_allocator(const c10::DataPtr& memory) {
  const c10::DataPtr& data = allocated(memory);
  if (data.device().is_meta()) {
    return false;
  }
  const c10::DeleterFnPtr deleter = c10::GetAllocator(data.device().type())->raw_deleter();
  return data.get() == nullptr || deleter == nullptr || data.get_deleter() == deleter;
}

// Whether the owner may fill the memory again, or take the memory back, without notice: from_blob, a host's pinned
// memory. Not lent are
// - memory from before snug was loaded, and mapped files: both live as long as the storage;
// - parameters: a parameter lives as long as the model;
// - weights on the host or on another rank: the home keeps the values, and brings the values for each operator.
bool TapeStorages::is_lent(const at::Tensor& tensor) {
  const c10::DataPtr& data = allocated(memory_of(tensor.storage()));
  return !is_from_allocator(data) && !data.device().is_meta() && !tensor.requires_grad() &&
         !is_borrowed_or_absent(data) && data.get_deleter() != c10::GetDefaultCPUAllocator()->raw_deleter() &&
         at::MapAllocator::fromDataPtr(data) == nullptr && at::RefcountedMapAllocator::fromDataPtr(data) == nullptr;
}

// Called for a tensor that autograd keeps unchanged. Plain training reads the tensor in backward, lent memory or not,
// so a replay may read the tensor too.
void TapeStorages::trust(const at::Tensor& tensor) {
  if (is_lent(tensor)) {
    TapeStorage& storage = at(number_of(tensor));
    storage.origin = TapeStorage::Origin::Program;
    storage.holding.hold(tensor.storage());
  }
}

void TapeStorages::watch(int storage, c10::StorageImpl& impl) {
  c10::DataPtr data = impl.set_data_ptr(c10::DataPtr());
  void* const address = data.get();
  const c10::Device device = data.device();
  auto watch = std::unique_ptr<Watch>(new Watch{weak_from_this(), storage, std::move(data)});
  impl.set_data_ptr_noswap({address, watch.release(), &Watch::release, device});
  at(storage).is_watched = true;
}

// Fills the memory with 0xFF, so that nobody finds old values by luck.
void TapeStorages::poison(const c10::Storage& memory) {
  if (memory.device().is_cpu()) {
    std::memset(memory.mutable_data(), 0xFF, memory.nbytes());
    return;
  }
  const UnseenOperators unseen;
  storage_bytes(memory).fill_(0xFF);
}

void TapeStorages::dropped(int storage, c10::DataPtr data) {
  const std::lock_guard lock(state_->mutex);
  at(storage).is_watched = false;
  if (at(storage).holding.is_in_use()) {
    return;  // the storage goes on with other memory
  }
  if (state_->has_listener()) {
    if (std::exchange(at(storage).was_dropped, true)) {
      state_->listener->on_unused(storage);  // a backward pass inside the forward pass had rebuilt the storage
    } else {
      state_->listener->on_drop(storage);
    }
  }
  if (should_hold(storage) || goes_away(storage)) {
    at(storage).holding.park(std::move(data));
    settle(storage);
  } else if (state_->verifies && at(storage).is_counted && data.get() != nullptr) {
    const auto bytes = static_cast<size_t>(at(storage).bytes);  // an allocator may hand out the block next
    poison(c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false));
  }
}

// Whether the storage stays in memory while autograd has a tensor on the storage. A pass that keeps the graph also lets
// go of storages that the pass needs no more, if the storages can be made again.
bool TapeStorages::is_kept(int storage) const {
  const TapeStorage& s = at(storage);
  const TapeSchedule::ForStorage* scheduled = state_->cursor.of(storage);
  const bool is_dropped = s.is_evicted           ? true
                          : scheduled != nullptr ? !scheduled->keep_if_saved ||
                                                       (state_->keeps_graph && state_->cursor.is_let_go(*scheduled))
                                                 : drops_everything_ || state_->region.has_value();
  return !is_dropped || s.is_asked_inside || (!s.is_rebuildable && !goes_away(storage));
}

// Whether the storage goes to the store when nobody holds the storage, because of a later need.
bool TapeStorages::goes_away(int storage) const {
  const TapeStorage& s = at(storage);
  if (state_->region) {
    return s.is_offloaded;
  }
  const TapeSchedule::ForStorage* scheduled = store_ ? state_->cursor.of(storage) : nullptr;
  if (scheduled == nullptr) {
    return drops_everything_ && store_ != nullptr && !s.is_external() && !s.is_rebuildable;
  }
  return scheduled->is_offloaded && (state_->cursor.is_needed_later(*scheduled) || state_->keeps_graph);
}

bool TapeStorages::should_hold(int storage) const {
  const TapeStorage& s = at(storage);
  const bool is_outside = s.is_external() && !s.is_lent() && s.outside == nullptr && !s.is_unneeded;
  return is_outside || s.is_source || s.claimed || s.is_leaving || s.uses > 0 || (s.slots > 0 && is_kept(storage));
}

// Whether the tape holds the value or has a copy away. An operator of a region may be about to replace the value.
bool TapeStorages::has_value(plan::Value value) const {
  const TapeStorage& s = at(value.storage);
  const bool is_replaced = state_->region && value.version != s.last_version();
  return !is_replaced && (s.claimed || s.is_source || goes_away(value.storage));
}

// Makes the tape hold the storage, put the storage away or release the storage, as should_hold() and goes_away() say
// now.
void TapeStorages::settle(int storage) {
  TapeStorage& s = at(storage);
  if (should_hold(storage)) {
    if (!s.is_watched && !s.holding.is_own()) {
      s.holding.hold(find(storage));
    }
  } else if (s.holding.is_own() && goes_away(storage)) {
    put_away(storage);
  } else {
    s.holding.release(s.bytes);
  }
}

// Whether the tape alone has the memory, and can make the memory's contents again.
bool TapeStorages::is_evictable(int storage) const {
  const TapeStorage& s = at(storage);
  return (s.slots > 0 || s.claimed) && s.uses == 0 && s.is_rebuildable && !s.is_source && !s.is_asked_inside &&
         !s.is_leaving && s.is_counted && !s.is_external() && s.holding.is_only_own() && !goes_away(storage);
}

bool TapeStorages::is_dropped_by_plan(int storage) const {
  const TapeSchedule::ForStorage* scheduled = state_->cursor.of(storage);
  return scheduled != nullptr && !scheduled->keep_from_start && !scheduled->keep_if_saved;
}

void TapeStorages::evict(int storage) {
  at(storage).is_evicted = has_evicted_ = true;
  at(storage).claimed = false;
  settle(storage);
}

c10::Storage TapeStorages::find(int storage) {
  TapeStorage& s = at(storage);
  if (state_->is_closed && s.was_written_unseen()) {
    return {};
  }
  if (s.holding.is_parked()) {
    const c10::Storage memory = s.holding.release(s.bytes);
    note_place(storage, memory);
    if (!state_->is_closed && (state_->has_listener() || goes_away(storage))) {
      watch(storage, *memory.unsafeGetStorageImpl());
    }
    s.holding.hold(memory);
  }
  return s.was_given_back() ? c10::Storage() : s.holding.find();
}

// Notes that the storage's bytes are in another c10::Storage now. In the forward pass, the program may go on with the
// new c10::Storage.
void TapeStorages::note_place(int storage, const c10::Storage& memory) {
  TapeStorage& s = at(storage);
  if (!state_->is_closed) {
    numbers_.erase(s.holding.address());
    numbers_.emplace(memory.unsafeGetStorageImpl(), storage);
  }
  s.holding.see(memory);
}

// Notes that the current stream makes, or has made, the storage's bytes in another c10::Storage.
void TapeStorages::replace(int storage, const c10::Storage& memory) {
  note_place(storage, memory);
  begin_streams(storage, memory);
}

// Like find(), but also loads a storage from the store. From the first to the last use in backward, the tape holds an
// offloaded storage.
c10::Storage TapeStorages::bring(int storage) {
  wait_for_transfer(storage);  // before anybody can write to the memory
  c10::Storage memory = find(storage);
  if (!memory && at(storage).holding.is_away()) {
    memory = load(storage);
  }
  if (!memory && at(storage).outside != nullptr) {
    memory = from_outside(storage);
  }
  if (memory) {
    meet_stream(storage, memory);
  }
  const TapeStorage& s = at(storage);  // hooks of the program may have added storages
  const bool returns = state_->region ? s.outside != nullptr || (s.is_offloaded && s.unasked > 0) : goes_away(storage);
  if (memory && state_->is_closed && returns) {
    claim(storage);
  }
  return memory;
}

c10::Storage TapeStorages::load(int storage) {
  c10::Storage memory;
  state_->as_replay([&] {
    const UnseenOperators unseen;
    memory = at(storage).holding.load();
    replace(storage, memory);
    at(storage).counts.clear();  // this memory belongs to the tape alone
  });
  return memory;
}

// --- storages that leave

// Must not throw. If the store has no room, the storage stays in memory: the cost is memory, never the result.
void TapeStorages::put_away(int storage) {
  TapeStorage& s = at(storage);
  c10::Storage memory = s.holding.release(s.bytes);
  if (s.holding.is_away() || (state_->is_closed && s.has_changed_unseen())) {
    return;
  }
  const TapeSchedule::ForStorage* scheduled = state_->cursor.of(storage);
  const bool streams = scheduled != nullptr && scheduled->streams && !has_unpacked_;
  if (streams && std::ssize(leaving_) == plan::kStreamsAtOnce) {
    wait_for_oldest_transfer();
  }
  s.holding.put_away(send(storage, memory, /*waits=*/!streams));
  s.is_leaving = streams && s.holding.is_away();
  s.claimed = s.claimed || !s.holding.is_away();
  if (s.is_leaving || s.claimed) {
    s.holding.hold(std::move(memory));
  }
  if (s.is_leaving) {
    leaving_.push_back(storage);
  }
}

// Null: the copy failed.
std::unique_ptr<StoredAway> TapeStorages::send(int storage, const c10::Storage& memory, bool waits) {
  try {
    const UnseenOperators unseen;
    const c10::StreamGuard stream(gather_streams(storage));
    std::unique_ptr<StoredAway> copy = store_->store(memory);
    return copy && waits && !copy->finish() ? nullptr : std::move(copy);
  } catch (const std::exception& error) {
    store_->count_failure(at(storage).bytes, error.what());
    return nullptr;
  }
}

void TapeStorages::wait_for_oldest_transfer() {
  TapeStorage& s = at(leaving_.front());
  const int storage = leaving_.front();
  leaving_.pop_front();
  bool is_written = false;
  try {
    is_written = s.holding.away().finish();
  } catch (const std::exception& error) {
    store_->count_failure(s.bytes, error.what());
  }
  s.is_leaving = false;
  if (!is_written) {
    s.holding.put_away(nullptr);
    s.claimed = true;
  }
  settle(storage);
}

void TapeStorages::wait_for_transfer(int storage) {
  while (at(storage).is_leaving) {
    wait_for_oldest_transfer();
  }
}

void TapeStorages::finish_transfers_before(int op) {
  const TapeSchedule::Made* due = leaving_.empty() ? nullptr : state_->cursor.due(op);
  if (due != nullptr) {
    std::ranges::for_each(due->waits_for, [&](int storage) { wait_for_transfer(storage); });
  }
}

void TapeStorages::finish_transfers_and_fetch() {
  has_unpacked_ = true;
  while (!leaving_.empty()) {
    wait_for_oldest_transfer();
  }
  for (const int storage : state_->cursor.to_fetch()) {
    Holding& holding = at(storage).holding;
    if (holding.is_away() && !find(storage)) {
      state_->as_replay([&] {
        const UnseenOperators unseen;
        holding.away().prefetch();
      });
    }
  }
}

}  // namespace snug::detail
