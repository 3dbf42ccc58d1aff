#pragma once
// Lazy values: a tensor with the negative or the conjugate bit has other values than its memory. Autograd gives a
// parameter such a gradient where it is part of a complex number. Kernels that read memory, and LibTorch's operators on
// lists of tensors, cannot take it.

#include <ATen/core/Tensor.h>

namespace snug::detail {

inline bool is_lazy(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && (tensor.is_neg() || tensor.is_conj());
}

/// The gradient of a parameter, which has one. Where it is lazy, a copy that is not takes its place.
inline const at::Tensor& resolved_gradient(const at::Tensor& parameter) {
  if (is_lazy(parameter.grad())) {
    parameter.mutable_grad() = parameter.grad().resolve_conj().resolve_neg();
  }
  return parameter.grad();
}

}  // namespace snug::detail
