#pragma once
// Blocks of random models, as in random_blocks.h, that make life hard for who follows tensors and backward passes:
// forward-mode derivatives, vmap, hooks that compute or go backward themselves, results that the program keeps.

#include <memory>
#include <utility>

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/_unpack_dual.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/torch.h>

#include "tests/support/random_blocks.h"

namespace snug::testing {

/// While it lives, there are dual tensors.
struct DualLevel {
  uint64_t index = torch::autograd::ForwardADLevel::get_next_idx();
  DualLevel() = default;
  ~DualLevel() { torch::autograd::ForwardADLevel::release_idx(index); }
  DualLevel(const DualLevel&) = delete;
  DualLevel& operator=(const DualLevel&) = delete;

  torch::Tensor dual(const torch::Tensor& primal, const torch::Tensor& tangent) const {
    return torch::_make_dual(primal, tangent, static_cast<int64_t>(index));
  }
  /// The value and its tangent.
  std::pair<torch::Tensor, torch::Tensor> parts(const torch::Tensor& dual) const {
    auto [primal, tangent] = torch::_unpack_dual(dual, static_cast<int64_t>(index));
    return {std::move(primal), std::move(tangent)};
  }
};

/// As torch.vmap of Python: calls `layer` for all x[i] at once.
inline torch::Tensor vmap(const std::function<torch::Tensor(torch::Tensor)>& layer, const torch::Tensor& x) {
  namespace ft = at::functorch;
  struct Level {
    explicit Level(int64_t size)
        : number(
              ft::initAndPushDynamicLayer(ft::TransformType::Vmap, c10::SymInt(size), ft::RandomnessType::Different)) {}
    ~Level() { ft::popDynamicLayerAndDeleteMetadata(); }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    int64_t number;
  };
  const Level level(x.size(0));
  const torch::Tensor result = layer(ft::addBatchDim(x, 0, level.number));
  const auto* batched = ft::maybeGetBatchedImpl(result);
  TORCH_CHECK(batched != nullptr, "vmap: the result does not depend on the input");
  const torch::Tensor value = batched->value();
  const int64_t place = batched->bdim();
  return place == 0 ? value : value.movedim(place, 0);
}

}  // namespace snug::testing

namespace snug::testing::blocks {

// A derivative in one direction, by dual numbers, with a graph of its own. Weights have no tangents, for which LibTorch
// saves tensors without memory.
inline Layer tangents(Build& b) {
  const auto first = b.linear(b.width, b.width), second = b.linear(b.width, b.width);
  const int64_t kind = b.below(4);
  return [=](const Tensor& x) {
    const DualLevel level;
    const Tensor direction = x.detach().cos();
    const auto [value, slope] =
        level.parts(second->forward(activation(kind, first->forward(level.dual(x, direction)))));
    return value + slope.tanh();
  };
}

inline Layer vmapped(Build& b) {
  const auto first = b.linear(b.width, b.width), second = b.linear(b.width, b.width);
  return [=](const Tensor& x) {
    return vmap([&](const Tensor& row) { return second->forward(first->forward(row).tanh()) * row.sigmoid(); }, x);
  };
}

// A fixed point, and a hook that solves for its gradient by backward passes through one more step.
inline Layer equilibrium(Build& b) {
  const auto in = b.linear(b.width, b.width), cell = b.linear(b.width, b.width);
  const int64_t steps = 2 + b.below(4);
  return [=](const Tensor& x) {
    const auto step = [cell](const Tensor& z, const Tensor& of) {
      return torch::tanh(0.5 * cell->forward(z) + of).mul(of.sigmoid());
    };
    const Tensor injected = torch::gelu(in->forward(x));
    Tensor z = torch::zeros_like(injected);
    {
      const torch::NoGradGuard no_grad;
      for (int i = 0; i < 3; ++i) {
        z = step(z, injected);
      }
    }
    z = step(z, injected);
    const Tensor place = z.detach().clone().requires_grad_(true);
    const Tensor once_more = step(place, injected.detach());
    z.register_hook([=](const Tensor& gradient) {
      Tensor sum = gradient;
      for (int64_t i = 0; i < steps; ++i) {
        sum = torch::autograd::grad({once_more}, {place}, {sum}, /*retain_graph=*/true)[0] + gradient;
      }
      return sum;
    });
    return z;
  };
}

// Gradients that a hook changes, by what the forward pass computed.
inline Layer gradient_hook(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  return [=](const Tensor& x) {
    const Tensor h = linear->forward(x).tanh(), scale = (1 + h.detach().square()).rsqrt();
    h.register_hook([scale](const Tensor& gradient) { return gradient * scale.exp(); });
    return h.sin();
  };
}

// The program keeps a result in a variable, with its graph and its gradient, and another that the loss does not need.
inline Layer kept_results(Build& b) {
  const auto linear = b.linear(b.width, b.width), other = b.linear(b.width, 4);
  const auto kept = b.kept;
  return [=](const Tensor& x) {
    const Tensor h = linear->forward(x).tanh();
    h.retain_grad();
    *kept = {h, other->forward(h).exp().sigmoid()};
    return h.sin() + other->bias.sum() + other->weight.sum();
  };
}

}  // namespace snug::testing::blocks
