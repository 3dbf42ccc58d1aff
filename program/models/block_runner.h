#pragma once
// BlockRunner: a function by which a model runs its blocks, so that the model knows nothing of memory techniques.
//
//   model->set_block_runner([](const auto& block, auto x) { return snug::checkpoint(block, x); });

#include <functional>

#include <ATen/core/Tensor.h>

namespace snug {

/// Called once per block, in order. A runner must return the result of block(x), computed in any way. A runner may keep
/// `block`: the function owns everything necessary.
using BlockRunner = std::function<at::Tensor(const std::function<at::Tensor(at::Tensor)>& block, at::Tensor x)>;

}  // namespace snug
