#pragma once
// The norm of gradients of which each process has some.

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug::detail {

/// Returns the norm of the gradients of `parameters` over all processes, with the bits of grad_norm() of the same
/// gradients in one process. If `max_norm` is above 0, scales this process's gradients as clip_grad_norm_() does.
/// `counts_here`: whether this process's gradient of a parameter counts: exactly one process has such a gradient, or no
/// process. `sum_over_ranks`: adds up a tensor over all processes, in place. All gradients must be dense.
at::Tensor clip_over_ranks(const std::vector<at::Tensor>& parameters, double max_norm,
                           const std::function<bool(const at::Tensor&)>& counts_here,
                           const std::function<void(const at::Tensor&)>& sum_over_ranks);

}  // namespace snug::detail
