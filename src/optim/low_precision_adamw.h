#pragma once
// AdamW for FP16 and BF16 parameters: with FP32 master weights, or, for BF16, with stochastic rounding.

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include "src/optim/adamw_update.h"

namespace snug::detail {

/// The upper halves of the kernels' random numbers (RandomKeys) for `count` elements from number `first` on, as an int
/// tensor on the device of `step`. `step` is an FP32 scalar, and nothing waits for the device.
at::Tensor rounding_noise(const at::Tensor& step, uint64_t first, int64_t count);

/// Bytes that an update of `parameters` tensors with `elements` in all allocates on `device` and frees again. On the
/// CPU nothing, and on devices with kernels of snug's own some numbers for each tensor. On other devices also a
/// workspace for at most 4 Mi elements: 16 MiB with masters, 68 MiB with stochastic rounding.
int64_t low_precision_workspace_bytes(int64_t elements, int64_t parameters, bool has_masters, c10::Device device);

/// Allocates the memory of the update. The returned function only writes.
std::function<void()> prepare_low_precision_adamw(AdamWUpdate update);

}  // namespace snug::detail
