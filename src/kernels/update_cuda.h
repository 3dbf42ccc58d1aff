#pragma once
// The update of many tensors on a GPU: update_cuda.cu, on plain device pointers and without torch's or CUDA's headers.

#include "src/kernels/update_table.h"

namespace snug::kernels::detail {

/// Starts the update on `stream` (a cudaStream_t) of the current device, without waiting. Returns a cudaError_t, 0 for
/// success.
int launch_update(const UpdateTable& table, void* stream);

}  // namespace snug::kernels::detail
