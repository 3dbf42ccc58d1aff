#pragma once
// The one place through which every byte of CPU tensor memory goes: it counts live bytes, enforces caps, and tells
// observers. It wraps the allocator that LibTorch had and is put in its place when libsnug is loaded, so that nothing
// escapes the count.

#include <cstdint>

#include <c10/core/Device.h>

namespace snug::detail {

/// Told of every allocation and release of tensor memory, from any thread, one call at a time.
class MemoryObserver {
 public:
  virtual ~MemoryObserver() = default;
  virtual void on_allocate(c10::Device device, const void* data, int64_t bytes) noexcept = 0;
  virtual void on_free(c10::Device device, const void* data, int64_t bytes) noexcept = 0;
  /// Autograd keeps the storage that begins at `data` for backward.
  virtual void on_saved_for_backward(const void* data) noexcept = 0;
};

/// Whether an observer is to be told of saved tensors, which costs a hook for each of them.
enum class SavedTensors { Ignore, Report };

void add_observer(MemoryObserver&, SavedTensors);
void remove_observer(MemoryObserver&) noexcept;
bool saved_tensors_are_observed() noexcept;
void report_saved_for_backward(const void* data) noexcept;
/// For allocators other than the CPU's, which report through torch's own channel.
void report_allocation(c10::Device device, const void* data, int64_t bytes) noexcept;
void report_free(c10::Device device, const void* data, int64_t bytes) noexcept;

/// Throws ConfigError if LibTorch does not use this allocator, because another library has installed its own.
void require_cpu_allocator();

/// Bytes of CPU tensor memory alive now, as requested by tensors (no rounding).
int64_t live_cpu_bytes() noexcept;

/// Bytes of blocks that no tensor has, kept for tensors to come. Together with live bytes they are no more than were alive lately, and within
/// the limit.
int64_t kept_cpu_bytes() noexcept;

/// Caps are a set; the smallest one holds. An allocation that would go past it throws c10::OutOfMemoryError.
void add_cpu_limit(int64_t bytes);
void remove_cpu_limit(int64_t bytes) noexcept;

/// While it lives, caps of exactly `bytes` do not hold. Only to find out how large one must be.
class [[nodiscard]] CpuLimitPaused final {
 public:
  explicit CpuLimitPaused(int64_t bytes);
  ~CpuLimitPaused();
  CpuLimitPaused(const CpuLimitPaused&) = delete;
  CpuLimitPaused& operator=(const CpuLimitPaused&) = delete;

 private:
  int64_t bytes_;
};

/// Makes the allocation number `countdown` from now on (1: the next) throw c10::OutOfMemoryError, once; 0 takes that back.
/// Returns what was left of an earlier countdown. For tests of failure safety.
int64_t fail_allocation_after(int64_t countdown) noexcept;

}  // namespace snug::detail
