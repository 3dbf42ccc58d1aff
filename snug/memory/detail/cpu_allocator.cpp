#include "snug/memory/detail/cpu_allocator.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <limits>
#include <mutex>
#include <set>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "snug/core/bytes.h"
#include "snug/core/error.h"

// Every allocation carries its size in a header in front of the data, so that a release needs no table and no lock.
// oneDNN's scratch memory comes through raw_allocate, which demands that a DataPtr's context is its data pointer: the
// header satisfies that, a wrapping context would not. Tried on torch 2.11.0 and 2.13.0.

namespace snug::detail {
namespace {

// The data keeps the alignment of the allocation: torch's default is 64 bytes.
constexpr size_t kHeaderBytes = 64;
struct Header {
  size_t bytes;
};
static_assert(sizeof(Header) <= kHeaderBytes);

const c10::Device kCpu(c10::DeviceType::CPU);
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

struct Counters {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> limit{kNoLimit};
  std::atomic<int64_t> countdown{0};
  std::atomic<int> observer_count{0};
  std::atomic<int> saved_observer_count{0};
  std::mutex mutex;  // guards what follows
  std::vector<MemoryObserver*> observers;
  std::vector<MemoryObserver*> saved_observers;  // those of them that are told of saved tensors
  std::multiset<int64_t> limits;
};

Counters& counters() {
  static auto* instance = new Counters;  // outlives every tensor, so it is never destroyed
  return *instance;
}

template <class F>
void tell(F&& notify) noexcept {
  Counters& c = counters();
  if (c.observer_count.load(std::memory_order_relaxed) == 0) {
    return;
  }
  const std::lock_guard lock(c.mutex);
  for (MemoryObserver* observer : c.observers) {
    notify(*observer);
  }
}

bool is_the_one_to_fail(std::atomic<int64_t>& countdown) {
  return countdown.load(std::memory_order_relaxed) > 0 && countdown.fetch_sub(1) == 1;
}

// Counts the bytes in, or throws and leaves the count where it was.
void charge(int64_t bytes) {
  Counters& c = counters();
  TORCH_CHECK_WITH(OutOfMemoryError, !is_the_one_to_fail(c.countdown),
                   "snug: this allocation was made to fail by a test");
  const int64_t live = c.live.fetch_add(bytes) + bytes;
  const int64_t limit = c.limit.load(std::memory_order_relaxed);
  if (live > limit) {
    c.live.fetch_sub(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "MemoryLimit: an allocation of ", Bytes(bytes).str(),
                     " on cpu would make ", Bytes(live).str(), " of live tensor memory; the limit is ",
                     Bytes(limit).str(), ". Raise it, use smaller micro-batches, or checkpoint.");
  }
}

c10::Allocator* wrapped_allocator = nullptr;

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  void* base = static_cast<std::byte*>(data) - kHeaderBytes;
  const auto bytes = static_cast<int64_t>(static_cast<Header*>(base)->bytes);
  tell([&](MemoryObserver& observer) { observer.on_free(kCpu, data, bytes); });
  counters().live.fetch_sub(bytes);
  wrapped_allocator->raw_deallocate(base);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) {
      return {nullptr, nullptr, &release, kCpu};
    }
    const auto bytes = static_cast<int64_t>(n);
    charge(bytes);
    void* base = nullptr;
    try {
      base = wrapped_allocator->raw_allocate(n + kHeaderBytes);
    } catch (...) {
      counters().live.fetch_sub(bytes);
      throw;
    }
    static_cast<Header*>(base)->bytes = n;
    void* data = static_cast<std::byte*>(base) + kHeaderBytes;
    tell([&](MemoryObserver& observer) { observer.on_allocate(kCpu, data, bytes); });
    return {data, data, &release, kCpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }
};

// Before main, so before any tensor that a program makes. Tensors that other static initialisers may have made keep the
// deleter they were born with. Never destroyed, and the library is linked so that it stays loaded: tensors may outlive both.
c10::Allocator* const our_allocator = [] {
  auto* allocator = new CountingAllocator;
  constexpr uint8_t kAboveDefault = 1;
  wrapped_allocator = c10::GetCPUAllocator();
  c10::SetCPUAllocator(allocator, kAboveDefault);
  return allocator;
}();

void refresh_counts(Counters& c) {
  c.observer_count = static_cast<int>(c.observers.size());
  c.saved_observer_count = static_cast<int>(c.saved_observers.size());
}

void refresh_limit(Counters& c) { c.limit = c.limits.empty() ? kNoLimit : *c.limits.begin(); }

}  // namespace

void add_observer(MemoryObserver& observer, SavedTensors saved) {
  Counters& c = counters();
  const std::lock_guard lock(c.mutex);
  c.observers.push_back(&observer);
  if (saved == SavedTensors::Report) {
    c.saved_observers.push_back(&observer);
  }
  refresh_counts(c);
}

void remove_observer(MemoryObserver& observer) noexcept {
  Counters& c = counters();
  const std::lock_guard lock(c.mutex);
  std::erase(c.observers, &observer);
  std::erase(c.saved_observers, &observer);
  refresh_counts(c);
}

bool saved_tensors_are_observed() noexcept {
  return counters().saved_observer_count.load(std::memory_order_relaxed) > 0;
}

void report_saved_for_backward(const void* data) noexcept {
  Counters& c = counters();
  const std::lock_guard lock(c.mutex);
  for (MemoryObserver* observer : c.saved_observers) {
    observer->on_saved_for_backward(data);
  }
}

void report_allocation(c10::Device device, const void* data, int64_t bytes) noexcept {
  tell([&](MemoryObserver& observer) { observer.on_allocate(device, data, bytes); });
}

void report_free(c10::Device device, const void* data, int64_t bytes) noexcept {
  tell([&](MemoryObserver& observer) { observer.on_free(device, data, bytes); });
}

void require_cpu_allocator() {
  if (c10::GetCPUAllocator() != our_allocator) {
    throw ConfigError(
        "memory: another library has replaced snug's allocator of CPU memory, so tensors can be neither counted nor "
        "limited; load snug after it, or keep it from calling c10::SetCPUAllocator");
  }
}

int64_t live_cpu_bytes() noexcept { return counters().live.load(); }

void add_cpu_limit(int64_t bytes) {
  Counters& c = counters();
  const std::lock_guard lock(c.mutex);
  c.limits.insert(bytes);
  refresh_limit(c);
}

void remove_cpu_limit(int64_t bytes) noexcept {
  Counters& c = counters();
  const std::lock_guard lock(c.mutex);
  c.limits.erase(c.limits.find(bytes));
  refresh_limit(c);
}

int64_t fail_allocation_after(int64_t countdown) noexcept {
  return std::max<int64_t>(0, counters().countdown.exchange(countdown));
}

}  // namespace snug::detail
