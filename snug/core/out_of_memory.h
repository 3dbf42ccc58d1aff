#pragma once
// Which exceptions mean that there was no tensor memory.

#include <exception>

namespace snug {

/// Whether an exception says that a device or LibTorch ran out of tensor memory: c10::OutOfMemoryError, the c10::Error
/// with which CUDA and its libraries report an allocation of their own that failed, what an interpreter (TorchScript,
/// Python) makes of these, and LimitBelowUse.
bool is_out_of_memory(const std::exception& error);

}  // namespace snug
