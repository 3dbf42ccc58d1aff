#include "snug/memory/detail/peak_watch.h"

#include <algorithm>

#include <c10/core/CachingDeviceAllocator.h>

#include "snug/memory/limit.h"

namespace snug::detail {
namespace {

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : c10::DeviceIndex{0}; }

}  // namespace

PeakWatch::PeakWatch(c10::Device device) : device_(device), peak_(live_bytes(device).count()) {
  if (device.is_cpu()) {
    add_observer(*this, SavedTensors::Ignore);
  } else {
    c10::getDeviceAllocator(device.type())->resetPeakStats(index_of(device));
  }
}

PeakWatch::~PeakWatch() {
  if (device_.is_cpu()) {
    remove_observer(*this);
  }
}

int64_t PeakWatch::peak() const {
  if (device_.is_cpu()) {
    return peak_.load();
  }
  return c10::getDeviceAllocator(device_.type())->getDeviceStats(index_of(device_)).allocated_bytes[kAll].peak;
}

// Called after the allocation was counted, one call at a time.
void PeakWatch::on_allocate(c10::Device device, const void*, int64_t) noexcept {
  if (device.is_cpu()) {
    peak_ = std::max(peak_.load(std::memory_order_relaxed), live_cpu_bytes());
  }
}

}  // namespace snug::detail
