#include "snug/memory/detail/device.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "snug/core/error.h"

namespace snug::detail {

c10::Device ready(c10::Device device) {
  if (device.is_cpu()) {
    return device.type();
  }
  try {
    at::globalContext().lazyInitDevice(device.type());
    return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
  } catch (const c10::Error& error) {
    throw ConfigError(fmt::format("memory: device {} cannot be used: {}; use cpu, or a LibTorch and a driver for it",
                                  device.str(), error.what_without_backtrace()));
  }
}

}  // namespace snug::detail
