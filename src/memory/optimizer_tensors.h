#pragma once
// The tensors of an optimizer's state, whatever its kind.

#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

/// The state tensors in this process: the very tensors, not copies. Some may be undefined. Of torch's optimizers, SGD,
/// Adam, AdamW, RMSprop, Adagrad and LBFGS are supported; other optimizers of torch give no tensors.
std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer);

}  // namespace snug::detail
