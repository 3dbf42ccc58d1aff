#include "snug/memory/limit.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/memory/detail/cpu_allocator.h"
#include "snug/memory/detail/cuda_memory.h"
#include "snug/memory/detail/device.h"
#include "snug/memory/detail/saved_tensor_policy.h"

namespace snug {

Bytes live_bytes(c10::Device device) {
  if (device.is_cpu()) {
    detail::require_cpu_allocator();
    return Bytes(detail::live_cpu_bytes());
  }
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  device = detail::ready(device);
  return Bytes(c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).allocated_bytes[kAll].current);
}

MemoryLimit::MemoryLimit(c10::Device device, Bytes bytes) : device_(device), bytes_(bytes.count()) {
  if (bytes.is_unlimited()) {
    return;
  }
  detail::install_engine();  // a backward pass that runs out of memory is to leave none behind
  device_ = detail::ready(device);
  const Bytes live = live_bytes(device_);
  if (live > bytes) {
    throw ConfigError(fmt::format("MemoryLimit: {} of tensors are alive on {} already, more than the limit of {}",
                                  live.str(), device_.str(), bytes.str()));
  }
  if (device_.is_cpu()) {
    detail::add_cpu_limit(bytes_);
  } else if (device_.is_cuda()) {
    previous_fraction_ = detail::set_cuda_limit(device_, bytes_);
  } else {
    throw ConfigError(fmt::format(
        "MemoryLimit: cannot cap {}: only the CPU and CUDA devices have a limit; use one of them", device_.str()));
  }
}

MemoryLimit::~MemoryLimit() {
  if (Bytes(bytes_).is_unlimited()) {
    return;
  }
  if (device_.is_cpu()) {
    detail::remove_cpu_limit(bytes_);
  } else {
    detail::restore_cuda_fraction(device_, previous_fraction_);
  }
}

}  // namespace snug
