#pragma once
// What must be known of a device before its allocator is asked.

#include <c10/core/Device.h>

namespace snug::detail {

/// `device` with its runtime started, which its allocator demands, and with the index of the current device where it names none.
/// The CPU needs neither and has no index. Throws ConfigError if the device cannot be used in this process.
c10::Device ready(c10::Device device);

}  // namespace snug::detail
