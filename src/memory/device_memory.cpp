#include "src/memory/device_memory.h"

#include <algorithm>
#include <utility>

#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include "snug/core.h"
#include "src/core/limit_below_use.h"
#include "src/memory/device.h"
#include "src/memory/operator_cap.h"

namespace snug::detail {
namespace {

class CpuMemory final : public DeviceMemory {
 public:
  int64_t live(c10::Device) const override {
    require_cpu_allocator();
    return live_cpu_bytes();
  }
  int64_t peak(c10::Device) const override { return peak_cpu_bytes(); }
  int64_t restart_peak(c10::Device) override { return restart_cpu_peak(); }
  int64_t reserved(c10::Device) const override { return live_cpu_bytes(); }  // kept blocks make way for tensors
  void give_back(c10::Device) override { give_back_kept_cpu_bytes(); }
  int64_t fail_after(int64_t countdown) override { return fail_allocation_after(countdown); }

 private:
  void enforce(c10::Device, int64_t bytes) override { limit_cpu_bytes(bytes); }
};

// Allocators of devices report to the channel of the running thread. The threads of backward inherit the channel.
// LibTorch takes what is in the channel for a ProfilerStateBase, and reads whether a profiler is on.
class ProfilerChannel final : public torch::profiler::impl::ProfilerStateBase {
 public:
  ProfilerChannel()
      : ProfilerStateBase(torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled)) {}

  // Of the profiler that is in this thread's channel. The callback takes what is in the channel for the profiler.
  static at::CallbackHandle callback_of_profiler() {
    auto* const found = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
    auto* const profiler = dynamic_cast<ProfilerStateBase*>(found);
    return profiler == nullptr ? at::INVALID_CALLBACK_HANDLE : profiler->*&ProfilerChannel::handle_;
  }

  void reportMemoryUsage(void* data, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (device.is_cpu()) {
      return;  // counted by our own allocator
    }
    if (bytes >= 0) {
      report_allocation(device, data, bytes);
    } else {
      report_free(device, data, -bytes);
    }
  }
  // Only LibTorch's allocator for the CPU asks, and would warn of tensors older than the channel.
  bool memoryProfilingEnabled() const override { return false; }
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }
};

struct Registry {
  std::mutex mutex;
  std::map<c10::DeviceType, std::unique_ptr<DeviceMemory>> memories;
};

Registry& registry() {
  static auto* instance = [] {  // never destroyed, because the registry outlives every tensor
    auto* created = new Registry;
    created->memories.emplace(c10::DeviceType::CPU, std::make_unique<CpuMemory>());
    return created;
  }();
  return *instance;
}

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

auto stats_of(c10::Device device) { return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()); }

}  // namespace

int64_t DeviceMemory::Limits::smallest() const {
  const auto holds = std::find_if(bytes.begin(), bytes.end(), [&](int64_t one) { return !paused.contains(one); });
  return holds == bytes.end() ? kNoLimit : *holds;
}

void DeviceMemory::apply(const Limits& limits, c10::Device device) {
  const int64_t most = limits.smallest();
  enforce(device, most);
  if (reserved(device) > most) {
    give_back(device);
  }
}

void DeviceMemory::add_limit(c10::Device device, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Limits& limits = limits_[device.index()];
  const auto added = limits.bytes.insert(bytes);
  try {
    apply(limits, device);
    if (const int64_t rest = reserved(device); rest > bytes) {
      throw detail::LimitBelowUse(
          fmt::format("MemoryLimit: {} of {} are taken already, more than the limit of {}: tensors and the "
                      "gaps between them; raise the limit, or set it before there are tensors",
                      Bytes(rest).str(), device.str(), Bytes(bytes).str()));
    }
  } catch (...) {
    limits.bytes.erase(added);
    apply(limits, device);
    throw;
  }
}

void DeviceMemory::remove_limit(c10::Device device, int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  Limits& limits = limits_[device.index()];
  limits.bytes.erase(limits.bytes.find(bytes));
  apply(limits, device);
}

void DeviceMemory::pause_limit(c10::Device device, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Limits& limits = limits_[device.index()];
  limits.paused.insert(bytes);
  apply(limits, device);
}

void DeviceMemory::resume_limit(c10::Device device, int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  Limits& limits = limits_[device.index()];
  limits.paused.erase(limits.paused.find(bytes));
  apply(limits, device);
}

int64_t DeviceMemory::fail_after(int64_t) { throw Error("memory: allocations of this device cannot be made to fail"); }

int64_t AcceleratorMemory::live(c10::Device device) const { return stats_of(device).allocated_bytes[kAll].current; }

int64_t AcceleratorMemory::peak(c10::Device device) const { return stats_of(device).allocated_bytes[kAll].peak; }

int64_t AcceleratorMemory::restart_peak(c10::Device device) {
  const int64_t until_now = peak(device);
  c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
  return until_now;
}

int64_t AcceleratorMemory::reserved(c10::Device device) const {
  return has_cap() ? stats_of(device).reserved_bytes[kAll].current : live(device);
}

void AcceleratorMemory::give_back(c10::Device device) { c10::getDeviceAllocator(device.type())->emptyCache(); }

void AcceleratorMemory::enforce(c10::Device device, int64_t bytes) { set_operator_cap(*this, device, bytes); }

DeviceMemory& device_memory(c10::DeviceType type) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::unique_ptr<DeviceMemory>& memory = all.memories[type];
  if (memory == nullptr) {
    memory = std::make_unique<AcceleratorMemory>();
  }
  return *memory;
}

void register_device_memory(c10::DeviceType type, std::unique_ptr<DeviceMemory> memory) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.memories[type] = std::move(memory);
}

MemoryObservation::MemoryObservation(MemoryObserver& observer, c10::Device device, SavedTensors saved)
    : observer_(observer) {
  device = ready(device);
  if (!device.is_cpu()) {
    profiler_ = ProfilerChannel::callback_of_profiler();
    if (profiler_ != at::INVALID_CALLBACK_HANDLE) {
      at::disableCallback(profiler_);
    }
    channel_.emplace(c10::DebugInfoKind::PROFILER_STATE, std::make_shared<ProfilerChannel>());
  }
  add_observer(observer_, device, saved);
}

MemoryObservation::~MemoryObservation() {
  remove_observer(observer_);
  channel_.reset();
  if (profiler_ != at::INVALID_CALLBACK_HANDLE) {
    at::reenableCallback(profiler_);
  }
}

}  // namespace snug::detail
