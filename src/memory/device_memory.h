#pragma once
// DeviceMemory: counts, limits and gives back the tensor memory of a type of device, and in tests makes allocations
// fail. Each type of device has one object:
// - the CPU's object stands on snug's allocator;
// - every other object stands on LibTorch's interface of allocators;
// - CUDA's object adds a cap to LibTorch's interface.
//
//   DeviceMemory& memory = device_memory(device.type());
//   memory.live(ready(device));

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "src/memory/cpu_allocator.h"

namespace snug::detail {

/// Each `device` argument must be ready() (see device.h). All bytes are as counted by the device's allocator (see
/// core/allocated_bytes.h).
class DeviceMemory {
 public:
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  DeviceMemory() = default;
  virtual ~DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// The bytes alive now. On the CPU, throws ConfigError if another library has replaced snug's allocator.
  virtual int64_t live(c10::Device device) const = 0;
  /// The most bytes alive at once since restart_peak(). Callers that may be nested use PeakWatch instead.
  virtual int64_t peak(c10::Device device) const = 0;
  /// Restarts the peak at the bytes alive now. Returns the peak until now.
  virtual int64_t restart_peak(c10::Device device) = 0;
  /// Whether the allocator keeps limits. If not, operators keep limits (see operator_cap.h).
  virtual bool has_cap() const { return true; }
  /// The bytes that a limit counts: live bytes, and bytes that the allocator keeps even when a limit is reached.
  virtual int64_t reserved(c10::Device device) const = 0;
  /// Bytes of a limit that may be lost to gaps between tensors, for callers without a better estimate.
  virtual int64_t gaps() const { return 0; }
  /// Hands memory without tensors back to the system.
  virtual void give_back(c10::Device device) = 0;
  /// Makes a single allocation of any device of the type throw c10::OutOfMemoryError (see fail_allocation_after).
  virtual int64_t fail_after(int64_t countdown);

  /// Adds a cap on reserved bytes. Of several caps the smallest holds. Gives back memory that is in the way of the cap.
  /// Throws:
  /// - LimitBelowUse, if more is still reserved;
  /// - ConfigError, if the device cannot be capped at `bytes`.
  void add_limit(c10::Device device, int64_t bytes);
  /// Removes one cap of `bytes`, which must have been added.
  void remove_limit(c10::Device device, int64_t bytes) noexcept;
  /// While paused, caps of exactly `bytes` are off.
  void pause_limit(c10::Device device, int64_t bytes);
  void resume_limit(c10::Device device, int64_t bytes) noexcept;

 private:
  struct Limits {
    std::multiset<int64_t> bytes, paused;

    int64_t smallest() const;
  };

  void apply(const Limits& limits, c10::Device device);

  /// From now on an allocation that takes reserved bytes above `bytes` throws c10::OutOfMemoryError. kNoLimit: no
  /// allocation throws. Throws ConfigError if the device cannot be capped at `bytes`. Callers make one call at a time.
  virtual void enforce(c10::Device device, int64_t bytes) = 0;

  std::mutex mutex_;
  std::map<c10::DeviceIndex, Limits> limits_;
};

/// Any device whose allocator is a c10::DeviceAllocator. A c10::DeviceAllocator has no caps, so limits count live
/// bytes.
class AcceleratorMemory : public DeviceMemory {
 public:
  int64_t live(c10::Device device) const override;
  int64_t peak(c10::Device device) const override;
  int64_t restart_peak(c10::Device device) override;
  bool has_cap() const override { return false; }
  int64_t reserved(c10::Device device) const override;
  void give_back(c10::Device device) override;

 protected:
  void enforce(c10::Device device, int64_t bytes) override;
};

/// The object of a type of device: the registered object, or else an AcceleratorMemory. The object lives as long as the
/// process.
DeviceMemory& device_memory(c10::DeviceType type);

/// Must be called before the first device_memory(type): from a static initialiser.
void register_device_memory(c10::DeviceType type, std::unique_ptr<DeviceMemory> memory);

/// Tells `observer` of allocations and releases on `device` until the end of the scope:
/// - on the CPU, of all threads;
/// - elsewhere, of this thread and of this thread's backward passes, through LibTorch's channel for memory profilers
///   (c10::DebugInfoKind::PROFILER_STATE). The scope takes the place of a profiler in the channel, which records
///   nothing meanwhile, and must not begin or end meanwhile.
///
/// The scope must not be destroyed on another thread.
class [[nodiscard]] MemoryObservation final {
 public:
  MemoryObservation(MemoryObserver& observer, c10::Device device, SavedTensors saved = SavedTensors::Ignore);
  ~MemoryObservation();
  MemoryObservation(const MemoryObservation&) = delete;
  MemoryObservation& operator=(const MemoryObservation&) = delete;

 private:
  MemoryObserver& observer_;
  at::CallbackHandle profiler_ = at::INVALID_CALLBACK_HANDLE;
  std::optional<c10::DebugInfoGuard> channel_;
};

}  // namespace snug::detail
