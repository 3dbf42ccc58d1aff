#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include <ATen/MapAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StreamGuard.h>

#include "src/activations/storage_views.h"
#include "src/memory/operator_mode.h"
#include "src/planner/streams.h"
#include "src/remat/op_tape.h"

// In whose hands a storage is: the rules at the top of planner/simulator.cpp.

namespace snug::detail {

std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> OpTape::made_and_alive() const {
  const std::lock_guard lock(mutex_);
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> result;
  for (const TapeStorage& storage : storages_) {
    if (const c10::Storage memory = storage.is_external() ? c10::Storage() : storage.holding.find()) {
      result.push_back(memory.getWeakStorageImpl());
    }
  }
  return result;
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

// What was there before any tape watched it.
const c10::DataPtr& OpTape::allocated(const c10::DataPtr& memory) {
  const bool is_watched = memory.get_deleter() == &Watch::release;
  return is_watched ? allocated(static_cast<const Watch*>(memory.get_context())->data) : memory;
}

// Whether its device's allocator gave it, as far as that can be told.
bool OpTape::is_from_allocator(const c10::DataPtr& memory) {
  const c10::DataPtr& data = allocated(memory);
  if (data.device().is_meta()) {
    return false;
  }
  const c10::DeleterFnPtr deleter = c10::GetAllocator(data.device().type())->raw_deleter();
  return data.get() == nullptr || deleter == nullptr || data.get_deleter() == deleter;
}

// Whether its owner may fill it anew, or take it back, without a word: from_blob, a host's pinned memory. Memory from
// before snug was loaded, and mapped files, live as long as their storage; a parameter, as long as its model.
bool OpTape::is_lent(const at::Tensor& tensor) {
  const c10::DataPtr& data = allocated(tensor.storage().data_ptr());
  return !is_from_allocator(data) && !data.device().is_meta() && !tensor.requires_grad() &&
         data.get_deleter() != c10::GetDefaultCPUAllocator()->raw_deleter() &&
         at::MapAllocator::fromDataPtr(data) == nullptr && at::RefcountedMapAllocator::fromDataPtr(data) == nullptr;
}

// Autograd keeps it as it is. What plain training reads in backward from memory that is lent, a replay may read, too.
void OpTape::trust(const at::Tensor& tensor) {
  if (is_lent(tensor)) {
    TapeStorage& storage = at(number_of(tensor));
    storage.origin = TapeStorage::Origin::Program;
    storage.holding.hold(tensor.storage());
  }
}

void OpTape::watch(int storage, c10::StorageImpl& impl) {
  c10::DataPtr data = impl.set_data_ptr(c10::DataPtr());
  void* const address = data.get();
  const c10::Device device = data.device();
  auto watch = std::unique_ptr<Watch>(new Watch{weak_from_this(), storage, std::move(data)});
  impl.set_data_ptr_noswap({address, watch.release(), &Watch::release, device});
  at(storage).is_watched = true;
}

// So that nobody finds old values there by luck.
void OpTape::poison(const c10::Storage& memory) {
  if (memory.device().is_cpu()) {
    std::memset(memory.mutable_data(), 0xFF, memory.nbytes());
    return;
  }
  const UnseenOperators unseen;
  storage_bytes(memory).fill_(0xFF);
}

void OpTape::dropped(int storage, c10::DataPtr data) {
  const std::lock_guard lock(mutex_);
  at(storage).is_watched = false;
  if (at(storage).holding.is_in_use()) {
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
    at(storage).holding.park(std::move(data));
    settle(storage);
  } else if (verifies_ && at(storage).is_counted && data.get() != nullptr) {
    const auto bytes = static_cast<size_t>(at(storage).bytes);  // an allocator may hand the block out next
    poison(c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false));
  }
}

// A pass that keeps its graph lets go of what it needs no more, too, if that can come again.
bool OpTape::is_kept(int storage) const {
  const TapeStorage& s = storages_[static_cast<size_t>(storage)];
  const TapeSchedule::ForStorage* scheduled = cursor_.of(storage);
  const bool is_dropped = scheduled != nullptr
                              ? !scheduled->keep_if_saved || (keeps_graph_ && cursor_.is_let_go(*scheduled))
                              : drops_everything_;
  return !is_dropped || s.is_asked_inside || (!s.is_rebuildable && !goes_away(storage));
}

// Whether it is put away when nobody holds it, because it is needed later.
bool OpTape::goes_away(int storage) const {
  const TapeStorage& s = storages_[static_cast<size_t>(storage)];
  const TapeSchedule::ForStorage* scheduled = store_ ? cursor_.of(storage) : nullptr;
  if (scheduled == nullptr) {
    return drops_everything_ && store_ != nullptr && !s.is_external() && !s.is_rebuildable;
  }
  return scheduled->is_offloaded && (cursor_.is_needed_later(*scheduled) || keeps_graph_);
}

bool OpTape::should_hold(int storage) {
  const TapeStorage& s = at(storage);
  return (s.is_external() && !s.is_lent()) || s.claimed || s.is_leaving || s.uses > 0 ||
         (s.slots > 0 && is_kept(storage));
}

// Brings a storage from wherever it is into the tape's hands, or out of them, as should_hold() says now.
void OpTape::settle(int storage) {
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

c10::Storage OpTape::find(int storage) {
  TapeStorage& s = at(storage);
  if (is_closed_ && s.was_written_unseen()) {
    return {};
  }
  if (s.holding.is_parked()) {
    const c10::Storage memory = s.holding.release(s.bytes);
    note_place(storage, memory);
    if (!is_closed_ && (listener_ != nullptr || goes_away(storage))) {
      watch(storage, *memory.unsafeGetStorageImpl());
    }
    s.holding.hold(memory);
  }
  return s.was_given_back() ? c10::Storage() : s.holding.find();
}

// Its memory is in other hands than before. In the forward pass the program may go on with it.
void OpTape::note_place(int storage, const c10::Storage& memory) {
  TapeStorage& s = at(storage);
  if (!is_closed_) {
    numbers_.erase(s.holding.address());
    numbers_.emplace(memory.unsafeGetStorageImpl(), storage);
  }
  s.holding.see(memory);
}

// Likewise, or from where it was put away. What was to be is held from backward's first use until its last.
c10::Storage OpTape::bring(int storage) {
  wait_for_stream(storage);  // before anybody can write to it
  TapeStorage& s = at(storage);
  c10::Storage memory = find(storage);
  if (!memory && s.holding.is_away()) {
    memory = load(storage);
  }
  if (memory) {
    meet_stream(storage, memory);
  }
  if (memory && is_closed_ && goes_away(storage)) {
    s.claimed = true;
    settle(storage);
  }
  return memory;
}

c10::Storage OpTape::load(int storage) {
  c10::Storage memory;
  as_replay([&] {
    const UnseenOperators unseen;
    memory = at(storage).holding.load();
    note_place(storage, memory);
    begin_streams(storage, memory);
    at(storage).counts.clear();  // this memory is the tape's own
  });
  return memory;
}

// --- what leaves

// Nothing may be thrown here. If there is no room, it stays: that costs memory, never the result.
void OpTape::put_away(int storage) {
  TapeStorage& s = at(storage);
  c10::Storage memory = s.holding.release(s.bytes);
  if (s.holding.is_away() || (is_closed_ && s.was_written_unseen())) {
    return;
  }
  const TapeSchedule::ForStorage* scheduled = cursor_.of(storage);
  const bool streams = scheduled != nullptr && scheduled->streams && !has_unpacked_;
  if (streams && std::ssize(leaving_) == kStreamsAtOnce) {
    wait_for_oldest_stream();
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

// Null: it could not be stored.
std::unique_ptr<StoredAway> OpTape::send(int storage, const c10::Storage& memory, bool waits) {
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

void OpTape::wait_for_oldest_stream() {
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

void OpTape::wait_for_stream(int storage) {
  while (at(storage).is_leaving) {
    wait_for_oldest_stream();
  }
}

void OpTape::meet_streams_before(size_t op) {
  const TapeSchedule::Made* due = leaving_.empty() ? nullptr : cursor_.due(op);
  if (due != nullptr) {
    std::ranges::for_each(due->waits_for, [&](int storage) { wait_for_stream(storage); });
  }
}

void OpTape::meet_streams_of_unpacking() {
  has_unpacked_ = true;
  while (!leaving_.empty()) {
    wait_for_oldest_stream();
  }
  for (const int storage : cursor_.to_fetch()) {
    Holding& holding = at(storage).holding;
    if (holding.is_away() && !find(storage)) {
      as_replay([&] {
        const UnseenOperators unseen;
        holding.away().prefetch();
      });
    }
  }
}

}  // namespace snug::detail
