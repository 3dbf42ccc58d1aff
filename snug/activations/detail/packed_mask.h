#pragma once
// Masks of one bit per element as tensors: kernels/detail/bit_mask.h on the CPU, LibTorch's operators elsewhere.

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// `mask`: bool, contiguous. Returns uint8 [ceil(count / 8)] on its device.
at::Tensor pack_mask(const at::Tensor& mask);
/// The other way, to bool [count].
at::Tensor unpack_mask(const at::Tensor& bits, int64_t count);

/// The memory of `tensor` in address order. Requires a tensor that fills its memory without gaps or overlaps, as
/// results of elementwise operators do.
at::Tensor flat(const at::Tensor& tensor);

/// A run of memory in which each element is zero or one other value, as in dropout's factors. `other` has that value's
/// bits.
struct TwoValued {
  at::Tensor bits;
  uint64_t other;
};

/// `run`: contiguous, on the CPU, elements of 2, 4 or 8 bytes. Returns nullopt if it has a third value, as soon as that
/// is met.
std::optional<TwoValued> pack_two_valued(const at::Tensor& run);
at::Tensor unpack_two_valued(const TwoValued& packed, int64_t count, c10::ScalarType dtype);

}  // namespace snug::detail
