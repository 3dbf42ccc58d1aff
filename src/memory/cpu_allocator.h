#pragma once
// The allocator of all CPU tensor memory. The allocator counts live bytes, enforces caps and tells observers. The
// allocator wraps LibTorch's allocator, and replaces LibTorch's allocator when libsnug is loaded, so no allocation
// escapes the count.

#include <cstdint>
#include <filesystem>

#include <c10/core/Device.h>

namespace snug::detail {

/// Receives every allocation and release of tensor memory, from any thread, one call at a time.
class MemoryObserver {
 public:
  virtual ~MemoryObserver() = default;
  virtual void on_allocate(c10::Device device, const void* data, int64_t bytes) noexcept = 0;
  virtual void on_free(c10::Device device, const void* data, int64_t bytes) noexcept = 0;
  /// A limit forbade an allocation. Called only for allocations on the CPU.
  virtual void on_refused(int64_t /*bytes*/) noexcept {}
  /// Autograd keeps the storage that begins at `data` for backward.
  virtual void on_saved_for_backward(const void* data) noexcept = 0;
};

/// Whether an observer receives saved tensors, which costs a hook for each saved tensor.
enum class SavedTensors { Ignore, Report };

/// Tells the observer of allocations on `device` alone. MemoryObservation does the same for any device, within a scope.
void add_observer(MemoryObserver&, c10::Device device, SavedTensors);
void remove_observer(MemoryObserver&) noexcept;
bool saved_tensors_are_observed() noexcept;
void report_saved_for_backward(const void* data) noexcept;
/// For allocators other than the CPU's, which report through torch's own channel.
void report_allocation(c10::Device device, const void* data, int64_t bytes) noexcept;
void report_free(c10::Device device, const void* data, int64_t bytes) noexcept;

/// Throws ConfigError if LibTorch does not use snug's allocator, because another library has installed another
/// allocator.
void require_cpu_allocator();

/// Bytes of CPU tensor memory alive now, as requested by tensors (no rounding).
int64_t live_cpu_bytes() noexcept;

/// Bytes of blocks without a tensor, kept for later tensors. Live and kept bytes together never exceed the latest peak
/// of live bytes, nor the limit.
int64_t kept_cpu_bytes() noexcept;

void give_back_kept_cpu_bytes();

/// The most bytes alive at once since the latest restart_cpu_peak(). restart_cpu_peak() returns the peak until the
/// call.
int64_t peak_cpu_bytes() noexcept;
int64_t restart_cpu_peak() noexcept;

/// From now on an allocation with which live memory would exceed `bytes` throws c10::OutOfMemoryError.
void limit_cpu_bytes(int64_t bytes);

/// Bytes that count as a single live allocation on the CPU, without an allocation.
class [[nodiscard]] CountedBytes final {
 public:
  /// Throws as an allocation throws.
  explicit CountedBytes(int64_t bytes);
  ~CountedBytes();
  CountedBytes(const CountedBytes&) = delete;
  CountedBytes& operator=(const CountedBytes&) = delete;

 private:
  int64_t bytes_;
};

// --- tensors in files

/// The fewest bytes of a tensor with a file of its own. Tests with small models set another number.
size_t in_file_from() noexcept;
size_t set_in_file_from(size_t bytes) noexcept;

/// Puts this thread's allocations of in_file_from() bytes and more into FileMemory, until the end of the scope.
/// FileMemory does not count as live bytes, and is under no limit. Allocations throw Error if the file cannot be made.
/// Several scopes end in the reverse of the order in which the scopes began, on
/// the thread that made the scopes.
class [[nodiscard]] AllocationsInFile final {
 public:
  explicit AllocationsInFile(std::filesystem::path directory);
  ~AllocationsInFile();
  AllocationsInFile(const AllocationsInFile&) = delete;
  AllocationsInFile& operator=(const AllocationsInFile&) = delete;

 private:
  std::filesystem::path directory_;
  const std::filesystem::path* before_;
};

/// Makes a single allocation throw c10::OutOfMemoryError: number `countdown` from now on; 1 is the next allocation. 0
/// cancels an earlier call. Returns the rest of the earlier countdown. For tests of failure safety.
int64_t fail_allocation_after(int64_t countdown) noexcept;

}  // namespace snug::detail
