#pragma once
// A number for a tensor's values: equal for equal bits in equal order, almost surely different otherwise.

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Returns 64 bits, for comparison with the hash of a tensor of the same sizes and strides on the same device. Reads
/// every element, on the device if the tensor is large and contiguous, else on the host. Waits for the device. Returns
/// 0 for tensors whose bytes cannot be read (has_bytes.h).
uint64_t tensor_hash(const at::Tensor& tensor);

}  // namespace snug::detail
