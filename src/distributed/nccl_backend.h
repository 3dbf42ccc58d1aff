#pragma once
// The backend that connects CUDA devices.

#include <chrono>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace snug::detail {

/// NCCL among all ranks, each on the device that its tensors are on: one process per device. It connects when it first
/// sends. Null if snug was built without NCCL, or if there is no device.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    std::chrono::milliseconds timeout);

}  // namespace snug::detail
