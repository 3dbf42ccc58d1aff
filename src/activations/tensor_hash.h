#pragma once
// A number that stands for a tensor's values: equal for equal bits in equal order, almost surely different otherwise.

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// 64 bits, to be compared with those of a tensor of the same sizes and strides on the same device. Reads every
/// element, on the device if the tensor is large and contiguous, else on the host. Waits for the device. 0 for tensors
/// whose bytes cannot be read (has_bytes.h).
uint64_t tensor_hash(const at::Tensor& tensor);

}  // namespace snug::detail
