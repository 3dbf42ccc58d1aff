#pragma once
// Kernels for updates on devices: update_cuda.cu's where snug is built with it, and those that tests give.

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "src/kernels/update_table.h"

namespace snug::kernels::detail {

/// Starts the update on a stream of the device, without waiting. Throws Error.
using UpdateLauncher = void (*)(const UpdateTable& table, c10::Stream stream);

/// Null for a device without kernels.
UpdateLauncher update_launcher(c10::Device device);

/// For tests: gives kernels to the devices of a type that has none, or takes the kernels back (null).
void set_update_launcher(c10::DeviceType type, UpdateLauncher launcher);

/// CUDA's: cuda_update.cpp, or no_cuda_kernels.cpp.
UpdateLauncher cuda_update_launcher(c10::Device device);

}  // namespace snug::kernels::detail
