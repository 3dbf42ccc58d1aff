#pragma once
// BlockRunner: how a model is told to run its blocks, so that it knows nothing of memory techniques.
//
//   model->set_block_runner([](const auto& block, auto x) { return snug::checkpoint(block, x); });

#include <functional>

#include <ATen/core/Tensor.h>

namespace snug {

/// Called once per block, in order. It must return what block(x) returns, computed as it likes:
/// now, or once more in backward. `block` may be kept: it holds what it needs.
using BlockRunner = std::function<at::Tensor(const std::function<at::Tensor(at::Tensor)>& block, at::Tensor x)>;

}  // namespace snug
