#pragma once
// A number that stands for a tensor's values: equal for equal bits in equal order, almost surely different otherwise.

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// 64 bits. Reads every element, on a device by way of a copy on the host. Where there are no plain elements (sparse, undefined): 0.
uint64_t tensor_hash(const at::Tensor& tensor);

/// Whether this thread is in it: what it allocates there is no part of a step.
bool hashes_now() noexcept;

}  // namespace snug::detail
