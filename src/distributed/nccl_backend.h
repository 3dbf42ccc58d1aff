#pragma once
// The backend that connects CUDA devices.

#include <chrono>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace snug::detail {

/// NCCL among all ranks. Each rank uses the device of the rank's tensors: one process per device. NCCL connects at the
/// first send. Null if snug was built without NCCL, or if the machine has no CUDA device.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    std::chrono::milliseconds timeout);

}  // namespace snug::detail
