#pragma once
// Gradient clipping that never waits for the device: the norm is returned as a tensor.
//
//   snug::clip_grad_norm_(model->parameters(), 1.0);

#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

/// Scales the gradients of `parameters` in place so that the norm of all gradients taken together is at most
/// `max_norm`. Returns the norm before scaling, as a scalar tensor on the first gradient's device. The norm is FP64 if
/// a gradient is FP64, otherwise FP32, also for 16-bit gradients. Parameters without a gradient are skipped; without
/// any gradient the result is 0. A norm that is not finite makes the gradients NaN, as in Python: check the norm, or
/// use a GradScaler. Formula: torch/nn/utils/clip_grad.py, coefficient min(1, max_norm / (norm + 1e-6)). Sparse
/// gradients are coalesced first. Throws ConfigError unless max_norm >= 0 and norm_type > 0 (infinity included).
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0);

/// Returns the norm, and scales nothing.
at::Tensor grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

}  // namespace snug
