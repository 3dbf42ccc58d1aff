#pragma once
// DeviceMemory: the tensor memory of one type of device. It counts, limits, gives back and, in tests, fails. There is
// one object per type: the CPU's stands on snug's allocator, every other on LibTorch's interface of allocators, and
// CUDA's adds a cap to that.
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

#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "src/memory/cpu_allocator.h"

namespace snug::detail {

/// A `device` that a member takes must be ready() (see device.h). Bytes are those that the device's allocator counts
/// (see core/allocated_bytes.h).
class DeviceMemory {
 public:
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  DeviceMemory() = default;
  virtual ~DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// Alive now. On the CPU, throws ConfigError if another library has replaced snug's allocator.
  virtual int64_t live(c10::Device device) const = 0;
  /// The most that was alive at once since restart_peak(). PeakWatch is for callers that may be nested.
  virtual int64_t peak(c10::Device device) const = 0;
  /// Begins the peak anew with what is alive now. Returns the peak until now.
  virtual int64_t restart_peak(c10::Device device) = 0;
  /// Whether the allocator keeps limits. If not, operators do (see operator_cap.h).
  virtual bool has_cap() const { return true; }
  /// What a limit counts: live bytes, and those that the allocator keeps although a limit is reached.
  virtual int64_t reserved(c10::Device device) const = 0;
  /// Bytes of a limit that may be lost to gaps between tensors, where nobody knows better.
  virtual int64_t gaps() const { return 0; }
  /// Hands back to the system what no tensor has.
  virtual void give_back(c10::Device device) = 0;
  /// Makes one allocation of any device of this type throw c10::OutOfMemoryError (see fail_allocation_after).
  virtual int64_t fail_after(int64_t countdown);

  /// Adds a cap on reserved bytes. Of several the smallest holds. Gives back what is in its way. Throws
  /// LimitBelowUse if more is reserved all the same, and ConfigError if the device cannot be capped at that.
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

  /// From now on an allocation that takes reserved bytes above `bytes` throws c10::OutOfMemoryError. kNoLimit: none
  /// does. Throws ConfigError if that cannot be. One call at a time.
  virtual void enforce(c10::Device device, int64_t bytes) = 0;

  std::mutex mutex_;
  std::map<c10::DeviceIndex, Limits> limits_;
};

/// Any device whose allocator is a c10::DeviceAllocator. That has no caps, so limits are of live bytes.
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

/// The object of a type of device: the registered one, else an AcceleratorMemory. It lives as long as the process.
DeviceMemory& device_memory(c10::DeviceType type);

/// Must come before the first device_memory(type): from a static initialiser.
void register_device_memory(c10::DeviceType type, std::unique_ptr<DeviceMemory> memory);

/// While it lives, `observer` is told of allocations and releases on `device`: on the CPU of those of all threads,
/// elsewhere of those of this thread and of its backward passes, through LibTorch's channel for memory profilers
/// (c10::DebugInfoKind::PROFILER_STATE), whose place it takes. Not to be destroyed on another thread.
class [[nodiscard]] MemoryObservation final {
 public:
  MemoryObservation(MemoryObserver& observer, c10::Device device, SavedTensors saved = SavedTensors::Ignore);
  ~MemoryObservation();
  MemoryObservation(const MemoryObservation&) = delete;
  MemoryObservation& operator=(const MemoryObservation&) = delete;

 private:
  MemoryObserver& observer_;
  std::optional<c10::DebugInfoGuard> channel_;
};

}  // namespace snug::detail
