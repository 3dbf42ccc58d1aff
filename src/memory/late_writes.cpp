#include "src/memory/late_writes.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "src/memory/operator_mode.h"
#include "src/memory/weight_window.h"

namespace snug::detail {
namespace {

struct LateWrite {
  LateWrites* owner;
  std::vector<c10::Storage> memory;
  std::function<void()> write;
};

// Of the process, by the memory that a write uses. Optimizers may end after statics.
std::mutex mutex_of_writes;
auto& waiting = *new std::unordered_multimap<const c10::StorageImpl*, std::shared_ptr<LateWrite>>;
std::atomic<bool> has_waiting = false;  // so that operators without late writes take no lock

auto owned_by(const LateWrites* owner) {
  return [owner] { return std::ranges::find_if(waiting, [=](auto& use) { return use.second->owner == owner; }); };
}

// The write that `next` finds, which waits no longer; null: none.
template <class Next>
std::shared_ptr<LateWrite> taken(const Next& next) {
  const std::lock_guard lock(mutex_of_writes);
  const auto found = next();
  if (found == waiting.end()) {
    return nullptr;
  }
  const std::shared_ptr<LateWrite> one = found->second;
  for (const c10::Storage& storage : one->memory) {
    const auto [begin, end] = waiting.equal_range(storage.unsafeGetStorageImpl());
    if (const auto use = std::find_if(begin, end, [&](const auto& other) { return other.second == one; }); use != end) {
      waiting.erase(use);
    }
  }
  has_waiting = !waiting.empty();
  return one;
}

// A write may ask for other writes. Autocast and Python's modes of the operator that asks are not the write's.
template <class Next>
void make_writes(const Next& next) {
  while (const auto one = taken(next)) {
    const UnseenOperators unseen;
    const UnseenByWindows unseen_by_windows;
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard plain(c10::autocast_dispatch_keyset | c10::python_ks);
    one->write();
  }
}

}  // namespace

LateWrites::~LateWrites() {
  while (taken(owned_by(this))) {
  }
}

void LateWrites::add(const std::vector<at::Tensor>& tensors, std::function<void()> write) {
  const std::lock_guard lock(mutex_of_writes);
  const auto one = std::make_shared<LateWrite>(LateWrite{this, {}, std::move(write)});
  for (const at::Tensor& tensor : tensors) {
    one->memory.push_back(tensor.storage());
  }
  has_waiting = true;
  for (const c10::Storage& storage : one->memory) {
    waiting.emplace(storage.unsafeGetStorageImpl(), one);
  }
}

void LateWrites::make() { make_writes(owned_by(this)); }

void make_late_writes(const at::Tensor& tensor) {
  if (!has_waiting) {
    return;
  }
  make_writes(
      [&] { return tensor.has_storage() ? waiting.find(tensor.storage().unsafeGetStorageImpl()) : waiting.end(); });
}

bool has_late_writes(const c10::Storage& storage) {
  if (!has_waiting) {
    return false;
  }
  const std::lock_guard lock(mutex_of_writes);
  return waiting.contains(storage.unsafeGetStorageImpl());
}

}  // namespace snug::detail
