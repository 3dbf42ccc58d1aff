#include "src/memory/operator_cap.h"

#include <atomic>
#include <mutex>
#include <vector>

#include <c10/util/Exception.h>

#include "snug/core.h"
#include "src/memory/device_memory.h"

namespace snug::detail {
namespace {

std::mutex mutex_of_caps;
std::vector<OperatorCap> operator_caps;
std::atomic<bool> has_operator_caps = false;

}  // namespace

void set_operator_cap(const DeviceMemory& memory, c10::Device device, int64_t bytes) {
  const std::lock_guard lock(mutex_of_caps);
  std::erase_if(operator_caps, [&](const OperatorCap& cap) { return cap.device == device; });
  if (bytes != DeviceMemory::kNoLimit) {
    operator_caps.push_back({&memory, device, bytes});
  }
  has_operator_caps = !operator_caps.empty();
}

OperatorCapCheck::OperatorCapCheck() {
  if (!has_operator_caps) {
    return;
  }
  const std::lock_guard lock(mutex_of_caps);
  for (const OperatorCap& cap : operator_caps) {
    watched_.emplace_back(cap, cap.memory->live(cap.device));
  }
}

void OperatorCapCheck::check() const {
  for (const auto& [cap, before] : watched_) {
    const int64_t live = cap.memory->live(cap.device);
    TORCH_CHECK_WITH(OutOfMemoryError, live <= cap.bytes || live <= before, "MemoryLimit: an operator took ",
                     Bytes(live - before).str(), " on ", cap.device.str(), "; ", Bytes(live).str(),
                     " are alive after it, more than the limit of ", Bytes(cap.bytes).str());
  }
}

}  // namespace snug::detail
