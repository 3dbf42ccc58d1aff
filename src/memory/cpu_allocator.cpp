#include "src/memory/cpu_allocator.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "snug/core.h"
#include "src/core/file_memory.h"
#include "src/memory/block_cache.h"
#include "src/memory/evictable.h"

// Every allocation carries its size in a header in front of the data, so a release needs no table and no lock. oneDNN's
// scratch memory comes through raw_allocate, which demands a DataPtr whose context is the data pointer: the header
// satisfies the demand, a wrapping context does not. Tried on torch 2.11.0 and 2.13.0.
//
// Released big blocks are kept for the next tensor of the same size. The kept bytes are limited to the difference
// between the latest peak of live bytes and the live bytes now, so live and kept bytes together never exceed the peak
// or the limit. The process therefore takes no more memory than the peak needs anyway.

namespace snug::detail {
namespace {

// The data keeps the alignment of the allocation: torch's default is 64 bytes.
constexpr size_t kHeaderBytes = 64;
struct Header {
  size_t bytes;
  std::shared_ptr<FileMemory>* file;  // null: a block of the wrapped allocator
};
static_assert(sizeof(Header) <= kHeaderBytes);

const c10::Device kCpu(c10::DeviceType::CPU);
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kKeptFrom = std::numeric_limits<size_t>::max();  // the sanitizer must see each release
#else
constexpr size_t kKeptFrom = size_t{64} << 10;
#endif
constexpr int64_t kReleasesUntilAPeakIsOld = 20'000;  // releases of big blocks, as many as several steps make

struct Counters {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> peak{0};         // since the last moment at which a peak became old
  std::atomic<int64_t> peak_before{0};  // in the period before that moment
  std::atomic<int64_t> watched_peak{0};
  std::atomic<int64_t> big_releases{0};
  std::atomic<int64_t> limit{kNoLimit};
  std::atomic<int64_t> countdown{0};
  std::atomic<int> observer_count{0};
  std::atomic<int> saved_observer_count{0};
  std::mutex mutex;  // guards the observers below
  std::vector<std::pair<MemoryObserver*, c10::Device>> observers;
  std::vector<MemoryObserver*> saved_observers;  // the observers that hear of saved tensors
};

Counters& counters() {
  static auto* instance = new Counters;  // never destroyed, because the counters outlive every tensor
  return *instance;
}

template <class F>
void tell(c10::Device device, F&& notify) noexcept {
  Counters& c = counters();
  if (c.observer_count.load(std::memory_order_relaxed) == 0) {
    return;
  }
  const std::lock_guard lock(c.mutex);
  for (const auto& [observer, observed] : c.observers) {
    if (observed == device) {
      notify(*observer);
    }
  }
}

bool is_the_one_to_fail(std::atomic<int64_t>& countdown) {
  return countdown.load(std::memory_order_relaxed) > 0 && countdown.fetch_sub(1) == 1;
}

c10::Allocator* wrapped_allocator = nullptr;

BlockCache& kept_blocks() {
  static auto* instance = new BlockCache([](void* base) { wrapped_allocator->raw_deallocate(base); });
  return *instance;
}

// Shrinks the kept blocks to the room that `live` bytes leave below the limit and the latest peak.
void make_way(int64_t live) {
  BlockCache& kept = kept_blocks();
  const Counters& c = counters();
  const int64_t most =
      std::min(c.limit.load(std::memory_order_relaxed),
               std::max(c.peak.load(std::memory_order_relaxed), c.peak_before.load(std::memory_order_relaxed)));
  if (kept.bytes() > std::max<int64_t>(0, most - live)) {
    kept.shrink(std::max<int64_t>(0, most - live));
  }
}

void note_peak(std::atomic<int64_t>& peak, int64_t live) {
  int64_t before = peak.load(std::memory_order_relaxed);
  while (live > before && !peak.compare_exchange_weak(before, live)) {
  }
}

void keep(void* base, size_t bytes) {
  Counters& c = counters();
  if (c.big_releases.fetch_add(1) % kReleasesUntilAPeakIsOld == 0) {
    c.peak_before = c.peak.exchange(c.live.load());
  }
  kept_blocks().put(base, bytes);
  make_way(c.live.load());
}

// Adds the bytes to the count, or throws and leaves the count unchanged. Beyond the limit, owners of memory that can be
// made again are asked for room first.
void charge(int64_t bytes) {
  Counters& c = counters();
  TORCH_CHECK_WITH(OutOfMemoryError, !is_the_one_to_fail(c.countdown),
                   "snug: this allocation was made to fail by a test");
  const int64_t limit = c.limit.load(std::memory_order_relaxed);
  for (;;) {
    const int64_t live = c.live.fetch_add(bytes) + bytes;
    if (live <= limit) {
      make_way(live);
      return;
    }
    c.live.fetch_sub(bytes);
    if (!evict(live - limit)) {
      tell(kCpu, [&](MemoryObserver& observer) { observer.on_refused(bytes); });
      TORCH_CHECK_WITH(OutOfMemoryError, false, "MemoryLimit: an allocation of ", Bytes(bytes).str(),
                       " on cpu would make ", Bytes(live).str(), " of live tensor memory; the limit is ",
                       Bytes(limit).str(), "; raise it, or keep less alive at once");
    }
  }
}

// Gives up all kept blocks before reporting that memory is out.
void* new_block(size_t bytes) {
  try {
    return wrapped_allocator->raw_allocate(bytes);
  } catch (const c10::Error&) {
    kept_blocks().shrink(0);
  }
  try {
    return wrapped_allocator->raw_allocate(bytes);
  } catch (const c10::Error& error) {
    C10_THROW_ERROR(OutOfMemoryError, error.what_without_backtrace());
  }
}

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  void* base = static_cast<std::byte*>(data) - kHeaderBytes;
  const auto [size, file] = *static_cast<Header*>(base);
  if (file != nullptr) {
    delete file;
    return;
  }
  const auto bytes = static_cast<int64_t>(size);
  tell(kCpu, [&](MemoryObserver& observer) { observer.on_free(kCpu, data, bytes); });
  counters().live.fetch_sub(bytes);
  if (static_cast<size_t>(bytes) >= kKeptFrom) {
    keep(base, static_cast<size_t>(bytes));
  } else {
    wrapped_allocator->raw_deallocate(base);
  }
}

std::atomic<size_t> least_in_file{size_t{64} << 10};
thread_local const std::filesystem::path* directory_of_files = nullptr;

c10::DataPtr new_file(const std::filesystem::path& directory, size_t n) {
  TORCH_CHECK_WITH(OutOfMemoryError, !is_the_one_to_fail(counters().countdown),
                   "snug: this allocation was made to fail by a test");
  auto file =
      std::make_unique<std::shared_ptr<FileMemory>>(FileMemory::in(directory, static_cast<int64_t>(n + kHeaderBytes)));
  void* const base = (*file)->data();
  void* const data = static_cast<std::byte*>(base) + kHeaderBytes;
  new (base) Header{n, file.release()};
  return {data, data, &release, kCpu};
}

void note_peaks() {
  const int64_t live = counters().live.load(std::memory_order_relaxed);
  note_peak(counters().peak, live);
  note_peak(counters().watched_peak, live);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) {
      return {nullptr, nullptr, &release, kCpu};
    }
    if (directory_of_files != nullptr && n >= least_in_file) {
      return new_file(*directory_of_files, n);
    }
    const auto bytes = static_cast<int64_t>(n);
    void* base = n >= kKeptFrom ? kept_blocks().take(n) : nullptr;  // before charge(), which may give up the block
    try {
      charge(bytes);
    } catch (...) {
      if (base != nullptr) {
        keep(base, n);
      }
      throw;
    }
    try {
      base = base != nullptr ? base : new_block(n + kHeaderBytes);
    } catch (...) {
      counters().live.fetch_sub(bytes);
      throw;
    }
    note_peaks();
    new (base) Header{n, nullptr};
    void* data = static_cast<std::byte*>(base) + kHeaderBytes;
    tell(kCpu, [&](MemoryObserver& observer) { observer.on_allocate(kCpu, data, bytes); });
    return {data, data, &release, kCpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }
};

// Runs before main, and so before the program makes a tensor. Tensors of other static initialisers may be older, and
// keep the deleter of their construction. The allocator is never destroyed, and the library is linked so as to stay
// loaded, because tensors may outlive both.
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

}  // namespace

void add_observer(MemoryObserver& observer, c10::Device device, SavedTensors saved) {
  Counters& c = counters();
  const std::lock_guard lock(c.mutex);
  c.observers.emplace_back(&observer, device);
  if (saved == SavedTensors::Report) {
    c.saved_observers.push_back(&observer);
  }
  refresh_counts(c);
}

void remove_observer(MemoryObserver& observer) noexcept {
  Counters& c = counters();
  const std::lock_guard lock(c.mutex);
  std::erase_if(c.observers, [&](const auto& entry) { return entry.first == &observer; });
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
  tell(device, [&](MemoryObserver& observer) { observer.on_allocate(device, data, bytes); });
}

void report_free(c10::Device device, const void* data, int64_t bytes) noexcept {
  tell(device, [&](MemoryObserver& observer) { observer.on_free(device, data, bytes); });
}

void require_cpu_allocator() {
  if (c10::GetCPUAllocator() != our_allocator) {
    throw ConfigError(
        "memory: another library has replaced snug's allocator of CPU memory, so tensors can be neither counted nor "
        "limited; load snug after it, or keep it from calling c10::SetCPUAllocator");
  }
}

int64_t live_cpu_bytes() noexcept { return counters().live.load(); }

int64_t kept_cpu_bytes() noexcept { return kept_blocks().bytes(); }

void give_back_kept_cpu_bytes() { kept_blocks().shrink(0); }

int64_t peak_cpu_bytes() noexcept { return counters().watched_peak.load(); }

int64_t restart_cpu_peak() noexcept {
  Counters& c = counters();
  const int64_t until_now = c.watched_peak.exchange(0);  // before note_peak(), so no thread's allocation is missed
  note_peak(c.watched_peak, c.live.load());
  return until_now;
}

CountedBytes::CountedBytes(int64_t bytes) : bytes_(bytes) {
  charge(bytes_);
  note_peaks();
  tell(kCpu, [&](MemoryObserver& observer) { observer.on_allocate(kCpu, this, bytes_); });
}

CountedBytes::~CountedBytes() {
  tell(kCpu, [&](MemoryObserver& observer) { observer.on_free(kCpu, this, bytes_); });
  counters().live.fetch_sub(bytes_);
}

size_t in_file_from() noexcept { return least_in_file; }
size_t set_in_file_from(size_t bytes) noexcept { return least_in_file.exchange(bytes); }

AllocationsInFile::AllocationsInFile(std::filesystem::path directory)
    : directory_(std::move(directory)), before_(std::exchange(directory_of_files, &directory_)) {}

AllocationsInFile::~AllocationsInFile() {
  if (directory_of_files == &directory_) {  // otherwise a scope that began later is still alive
    directory_of_files = before_;
  }
}

void limit_cpu_bytes(int64_t bytes) {
  counters().limit = bytes;
  make_way(counters().live.load());
}

int64_t fail_allocation_after(int64_t countdown) noexcept {
  return std::max<int64_t>(0, counters().countdown.exchange(countdown));
}

}  // namespace snug::detail
