#include "snug/memory/detail/peak_watch.h"

#include <algorithm>

#include <c10/core/CachingDeviceAllocator.h>

#include "snug/memory/detail/device.h"
#include "snug/memory/limit.h"

namespace snug::detail {
namespace {

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

}  // namespace

PeakWatch::PeakWatch(c10::Device device) : device_(ready(device)), peak_(live_bytes(device_).count()) {
  if (device_.is_cpu()) {
    add_observer(*this, SavedTensors::Ignore);
  } else {
    c10::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
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
  return c10::getDeviceAllocator(device_.type())->getDeviceStats(device_.index()).allocated_bytes[kAll].peak;
}

// Called after the allocation was counted, one call at a time.
void PeakWatch::on_allocate(c10::Device device, const void*, int64_t) noexcept {
  if (device.is_cpu()) {
    peak_ = std::max(peak_.load(std::memory_order_relaxed), live_cpu_bytes());
  }
}

}  // namespace snug::detail
