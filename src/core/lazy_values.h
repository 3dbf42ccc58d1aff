#pragma once
// Lazy values: a tensor with the negative or the conjugate bit has other values than the tensor's memory. Autograd
// gives a parameter a lazy gradient if the parameter is part of a complex number. Kernels that read memory, and
// LibTorch's operators on lists of tensors, cannot take a lazy tensor.

#include <ATen/core/Tensor.h>

namespace snug::detail {

inline bool is_lazy(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && (tensor.is_neg() || tensor.is_conj());
}

/// The gradient of `parameter`, which must have a gradient. A lazy gradient is replaced by a copy that is not lazy.
inline const at::Tensor& resolved_gradient(const at::Tensor& parameter) {
  if (is_lazy(parameter.grad())) {
    parameter.mutable_grad() = parameter.grad().resolve_conj().resolve_neg();
  }
  return parameter.grad();
}

}  // namespace snug::detail
