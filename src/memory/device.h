#pragma once
// Preparation of a device before its allocator is asked.

#include <c10/core/Device.h>

namespace snug::detail {

/// Starts the runtime of `device`, which the device's allocator requires, and returns the device with an index. A
/// device without an index gets the index of the current device. The CPU needs no runtime and has no index. Throws
/// ConfigError if the device cannot be used in this process.
c10::Device ready(c10::Device device);

/// Makes the libraries of a device allocate workspaces now, on the current stream. The libraries keep the workspaces
/// from the first product on; without this call the workspaces look like activations of the first step. Has no effect
/// on the CPU.
void take_workspaces(c10::Device device);

}  // namespace snug::detail
