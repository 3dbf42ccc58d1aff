#pragma once
// The definition of a 16-bit tensor.

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// FP16 or BF16: a type too coarse for updates.
inline bool is_low(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

}  // namespace snug::detail
