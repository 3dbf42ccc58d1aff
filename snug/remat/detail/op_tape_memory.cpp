#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include <ATen/MapAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "snug/remat/detail/op_tape.h"

// Whose memory a tape finds, what comes back to it when the program lets go, and what it puts away.

namespace snug::detail {

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
  /// What was there before any tape watched it.
  static const c10::DataPtr& watched(const c10::DataPtr& data) {
    return data.get_deleter() == &release ? watched(static_cast<const Watch*>(data.get_context())->data) : data;
  }
};

// Whether its device's allocator gave it, as far as that can be told.
bool OpTape::is_from_allocator(const c10::DataPtr& memory) {
  const c10::DataPtr& data = Watch::watched(memory);
  if (data.device().is_meta()) {
    return false;
  }
  const c10::DeleterFnPtr deleter = c10::GetAllocator(data.device().type())->raw_deleter();
  return data.get() == nullptr || deleter == nullptr || data.get_deleter() == deleter;
}

// Whether its owner may fill it anew, or take it back, without a word: from_blob, a host's pinned memory. What was allocated before snug was
// loaded, and mapped files, live as long as their storage; a parameter, as long as its model.
bool OpTape::is_lent(const at::Tensor& tensor) {
  const c10::DataPtr& data = Watch::watched(tensor.storage().data_ptr());
  return !is_from_allocator(data) && !data.device().is_meta() && !tensor.requires_grad() &&
         data.get_deleter() != c10::GetDefaultCPUAllocator()->raw_deleter() &&
         at::MapAllocator::fromDataPtr(data) == nullptr && at::RefcountedMapAllocator::fromDataPtr(data) == nullptr;
}

// Autograd keeps it as it is. What plain training reads in backward from memory that is lent, a replay may read, too.
void OpTape::trust(const at::Tensor& tensor) {
  if (is_lent(tensor)) {
    TapeStorage& storage = at(number_of(tensor));
    storage.is_lent = false;
    storage.held = tensor.storage();
  }
}

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
  } else if (verifies_ && at(storage).is_counted && data.device().is_cpu() && data.get() != nullptr) {
    std::memset(data.get(), 0xFF,
                static_cast<size_t>(at(storage).bytes));  // so that nobody finds the old values by luck
  }
}

// Nothing may be thrown here. If there is no room, it stays: that costs memory, never the result.
void OpTape::put_away(int storage) {
  TapeStorage& s = at(storage);
  c10::Storage memory =
      s.held ? std::exchange(s.held, {})
             : c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(s.bytes), std::move(s.parked));
  s.parked.clear();  // which is not empty because it was moved from
  if (s.away || (is_closed_ && s.was_written_unseen())) {
    return;
  }
  try {
    const UnseenOperators unseen;
    s.away = store_->store(memory);
    if (s.away && !s.away->finish()) {
      s.away = nullptr;
    }
  } catch (const std::exception& error) {
    s.away = nullptr;
    store_->count_failure(s.bytes, error.what());
  }
  if (!s.away) {
    s.held = std::move(memory);
    s.claimed = true;
  }
}

}  // namespace snug::detail
