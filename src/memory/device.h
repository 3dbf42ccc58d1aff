#pragma once
// Preparation of a device before its allocator is asked.

#include <c10/core/Device.h>

namespace snug::detail {

/// Starts the runtime of `device`, which its allocator requires, and returns the device with an index: that of the
/// current device if it names none. The CPU needs neither and has no index. Throws ConfigError if the device cannot be
/// used in this process.
c10::Device ready(c10::Device device);

/// Makes the libraries of a device take what they keep from their first product on, on the current stream: else it
/// looks like activations of the first step. Nothing on the CPU.
void take_workspaces(c10::Device device);

}  // namespace snug::detail
