#pragma once
// The allocator of all CPU tensor memory. It counts live bytes, enforces caps and tells observers. It wraps the
// allocator that LibTorch had, and takes its place when libsnug is loaded, so that no allocation escapes the count.

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
  /// An allocation that a limit forbade: on the CPU.
  virtual void on_refused(int64_t /*bytes*/) noexcept {}
  /// Autograd keeps the storage that begins at `data` for backward.
  virtual void on_saved_for_backward(const void* data) noexcept = 0;
};

/// Whether an observer receives saved tensors, which costs a hook for each of them.
enum class SavedTensors { Ignore, Report };

/// The observer is told of allocations on `device` alone. MemoryObservation is this for any device and a scope.
void add_observer(MemoryObserver&, c10::Device device, SavedTensors);
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

/// Bytes of blocks that no tensor has, kept for later tensors. Live and kept bytes together never exceed the latest
/// peak of live bytes, nor the limit.
int64_t kept_cpu_bytes() noexcept;

void give_back_kept_cpu_bytes();

/// The most bytes that were alive at once since the latest restart_cpu_peak(), which returns the peak until then.
int64_t peak_cpu_bytes() noexcept;
int64_t restart_cpu_peak() noexcept;

/// An allocation that would make more than `bytes` of live memory throws c10::OutOfMemoryError.
void limit_cpu_bytes(int64_t bytes);

/// Bytes that count as one live allocation of the CPU's, without being one.
class [[nodiscard]] CountedBytes final {
 public:
  /// Throws as an allocation does.
  explicit CountedBytes(int64_t bytes);
  ~CountedBytes();
  CountedBytes(const CountedBytes&) = delete;
  CountedBytes& operator=(const CountedBytes&) = delete;

 private:
  int64_t bytes_;
};

// --- tensors in files

/// The fewest bytes of a tensor that lies in a file of its own. Tests with small models set another.
size_t in_file_from() noexcept;
size_t set_in_file_from(size_t bytes) noexcept;

/// While it lives, what this thread allocates of in_file_from() bytes and more is FileMemory: no live bytes, and under
/// no limit. `directory` must outlive it. Allocations throw Error if the file cannot be made. Several end in the
/// reverse of the order in which they began, on the thread that made them.
class [[nodiscard]] AllocationsInFile final {
 public:
  explicit AllocationsInFile(const std::filesystem::path& directory);
  ~AllocationsInFile();
  AllocationsInFile(const AllocationsInFile&) = delete;
  AllocationsInFile& operator=(const AllocationsInFile&) = delete;

 private:
  const std::filesystem::path* directory_;
  const std::filesystem::path* before_;
};

/// Makes one allocation throw c10::OutOfMemoryError: number `countdown` from now on, where 1 is the next one. 0 cancels
/// an earlier call. Returns the rest of the earlier countdown. For tests of failure safety.
int64_t fail_allocation_after(int64_t countdown) noexcept;

}  // namespace snug::detail
