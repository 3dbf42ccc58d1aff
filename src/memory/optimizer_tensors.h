#pragma once
// The tensors of an optimizer's state, whatever its kind.

#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

/// Those that this process holds, as the very tensors; some may be undefined. Of torch's optimizers: SGD, Adam, AdamW,
/// RMSprop, Adagrad and LBFGS, and nothing of others.
std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer);

}  // namespace snug::detail
