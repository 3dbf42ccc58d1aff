#include "src/memory/peak_watch.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "src/memory/device.h"
#include "src/memory/device_memory.h"

// A device's allocator has a single peak. A new watch restarts the peak, and notes the peak until then in all older
// watches.

namespace snug::detail {
namespace {

std::mutex mutex_of_watches;
std::vector<PeakWatch*> watches_alive;

}  // namespace

PeakWatch::PeakWatch(c10::Device device) : device_(ready(device)) {
  DeviceMemory& memory = device_memory(device_.type());
  memory.live(device_);  // throws if nothing is counted
  const std::lock_guard lock(mutex_of_watches);
  const int64_t until_now = memory.restart_peak(device_);
  for (PeakWatch* watch : watches_alive) {
    if (watch->device_ == device_) {
      watch->earlier_ = std::max(watch->earlier_, until_now);
    }
  }
  watches_alive.push_back(this);
}

PeakWatch::~PeakWatch() {
  const std::lock_guard lock(mutex_of_watches);
  std::erase(watches_alive, this);
}

int64_t PeakWatch::peak() const {
  const std::lock_guard lock(mutex_of_watches);
  return std::max(earlier_, device_memory(device_.type()).peak(device_));
}

}  // namespace snug::detail
