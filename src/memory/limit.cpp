#include <fmt/format.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/core/limit_below_use.h"
#include "src/memory/device.h"
#include "src/memory/device_memory.h"
#include "src/memory/limit_paused.h"
#include "src/memory/operator_mode.h"
#include "src/memory/saved_tensor_policy.h"

namespace snug {

Bytes live_bytes(c10::Device device) { return Bytes(detail::device_memory(device.type()).live(detail::ready(device))); }

Bytes MemoryLimit::smallest(c10::Device device) {
  device = detail::ready(device);
  detail::DeviceMemory& memory = detail::device_memory(device.type());
  if (memory.reserved(device) > memory.live(device)) {
    memory.give_back(device);
  }
  return Bytes(memory.reserved(device));
}

MemoryLimit::MemoryLimit(c10::Device device, Bytes bytes) : device_(device), bytes_(bytes.count()) {
  if (bytes.is_unlimited()) {
    return;
  }
  detail::install_engine();  // a backward pass that runs out of memory must leave no memory behind
  device_ = detail::ready(device);
  const Bytes live = live_bytes(device_);
  if (live > bytes) {
    throw detail::LimitBelowUse(
        fmt::format("MemoryLimit: {} of tensors are alive on {} already, more than the limit of {}", live.str(),
                    device_.str(), bytes.str()));
  }
  detail::DeviceMemory& memory = detail::device_memory(device_.type());
  if (!memory.has_cap()) {
    seam_ = std::make_unique<detail::OperatorSeam>();
  }
  memory.add_limit(device_, bytes_);
}

MemoryLimit::~MemoryLimit() {
  if (!Bytes(bytes_).is_unlimited()) {
    detail::device_memory(device_.type()).remove_limit(device_, bytes_);
  }
}

}  // namespace snug

namespace snug::detail {

LimitPaused::LimitPaused(c10::Device device, Bytes bytes) : device_(ready(device)), bytes_(bytes.count()) {
  device_memory(device_.type()).pause_limit(device_, bytes_);
}

LimitPaused::~LimitPaused() { device_memory(device_.type()).resume_limit(device_, bytes_); }

}  // namespace snug::detail
