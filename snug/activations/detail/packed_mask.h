#pragma once
// Masks of one bit per element as tensors: kernels/bit_mask.h on the CPU, LibTorch's operators elsewhere.

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// `mask`: bool, contiguous. Returns uint8 [ceil(count / 8)] on its device.
at::Tensor pack_mask(const at::Tensor& mask);
/// The other way, to bool [count].
at::Tensor unpack_mask(const at::Tensor& bits, int64_t count);

/// The memory of `tensor` in address order, for tensors that fill theirs without gaps or overlaps, as results of elementwise operators do.
at::Tensor flat(const at::Tensor& tensor);

/// A run of memory of which each element is zero or one other value, as dropout's factors are. `other` has that value's bits.
struct TwoValued {
  at::Tensor bits;
  uint64_t other;
};

/// nullopt where `run` (contiguous, on the CPU, elements of 2, 4 or 8 bytes) is not of that kind; found out at its first third value.
std::optional<TwoValued> pack_two_valued(const at::Tensor& run);
at::Tensor unpack_two_valued(const TwoValued& packed, int64_t count, c10::ScalarType dtype);

}  // namespace snug::detail
