#pragma once
// Gradients as autograd really makes them where a parameter of one element is part of a complex number: their memory
// has the negative of their values.

#include <torch/torch.h>

namespace snug::testing {

/// A parameter of one element, 1, without gradient.
inline torch::Tensor one() { return torch::ones({1}).requires_grad_(); }

/// Gives such a parameter a gradient of 0.7.
inline void set_lazy_gradient(const torch::Tensor& parameter) {
  const torch::Tensor z = torch::complex(torch::ones_like(parameter), parameter);
  torch::real(torch::conj(z) * torch::complex(torch::zeros({1}), torch::full({1}, 0.7))).sum().backward();
}

}  // namespace snug::testing
