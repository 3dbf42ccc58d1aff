#pragma once
// snug's own CUDA kernels: cuda_kernels.cpp where snug is built with SNUG_CUDA_ADAMW, else no_cuda_kernels.cpp.

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "src/kernels/update_table.h"

namespace snug::kernels::detail {

/// Starts the update of a table on a stream of the current device, without waiting. Throws Error.
using UpdateLauncher = void (*)(const UpdateTable& table, c10::Stream stream);

/// Null if there is no kernel for the device.
UpdateLauncher cuda_update_launcher(c10::Device device);

}  // namespace snug::kernels::detail
