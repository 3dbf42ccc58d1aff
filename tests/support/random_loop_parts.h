#pragma once
// What training loops do beside a model: buffers of odd kinds, modes of children, steps that change, leaves and results
// of the program. A part adds a term to the loss, and has state to compare after training.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

namespace snug::testing::loop_parts {

namespace nn = torch::nn;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

/// A part of a training loop. Functions may be empty.
struct Part {
  std::function<void(int64_t step)> before_step = {};                 ///< by the program, outside of the step
  std::function<Tensor(const Tensor& rows, int64_t step)> term = {};  ///< of the loss; rows: [items, 8], FP32
  std::function<Tensors()> state = [] { return Tensors(); };          ///< beside what the module has registered
};

constexpr int64_t kWidth = 8;

inline nn::Linear add_linear(nn::Module& owner, const std::string& name) {
  return owner.register_module(name, nn::Linear(kWidth, kWidth));
}

// A buffer that each forward pass changes without a graph, and what it then reads of it.
inline Part with_buffer(nn::Module& owner, Tensor buffer, std::function<void(Tensor&, const Tensor&)> change) {
  const auto state = std::make_shared<Tensor>(owner.register_buffer("state", std::move(buffer)));
  return {.term = [=](const Tensor& rows, int64_t) {
    const torch::NoGradGuard no_grad;
    change(*state, rows);
    return (state->is_sparse() ? state->to_dense() : *state).square().mean();
  }};
}

inline Part grown_buffer(nn::Module& owner, uint64_t seed) {
  if (seed % 2 == 0) {
    return with_buffer(owner, torch::zeros({0, kWidth}), [](Tensor& state, const Tensor& rows) {
      state.set_data(torch::cat({state, rows.narrow(0, 0, 1).detach().clone()}));
    });
  }
  return with_buffer(owner, torch::zeros({2}), [](Tensor& state, const Tensor& rows) {
    state.resize_({state.size(0) + 3}).fill_(rows.detach().mean().item());
  });
}

inline Part sparse_buffer(nn::Module& owner, uint64_t) {
  return with_buffer(owner, torch::eye(kWidth).to_sparse(),
                     [](Tensor& state, const Tensor& rows) { state._values().mul_(0.5).add_(rows.detach().mean()); });
}

inline Part expanded_buffer(nn::Module& owner, uint64_t) {
  return with_buffer(owner, torch::ones({1}).expand({16}), [](Tensor& state, const Tensor& rows) {
    state.as_strided({1}, {1}).mul_(0.5).add_(rows.detach().mean());
  });
}

// Two buffers on the memory of one, which is no buffer.
inline Part buffers_that_are_views(nn::Module& owner, uint64_t) {
  const Tensor whole = torch::zeros({6, kWidth}), part = owner.register_buffer("part", whole.narrow(0, 1, 3));
  const Tensor column = owner.register_buffer("column", whole.select(1, 2));
  return {.term =
              [=](const Tensor& rows, int64_t) {
                const torch::NoGradGuard no_grad;
                part.mul_(0.5).add_(rows.detach().mean(0));
                column.add_(1);
                return whole.square().mean();
              },
          .state = [=] { return Tensors{whole}; }};
}

inline Part modes_of_children(nn::Module& owner, uint64_t seed) {
  return {.before_step = [children = owner.children(), seed](int64_t step) {
    for (size_t i = 0; i < children.size(); ++i) {
      children[i]->train((static_cast<uint64_t>(step) + i + seed) % 3 != 0);
    }
  }};
}

inline Part changing_depth(nn::Module& owner, uint64_t seed) {
  std::vector<nn::Linear> layers;
  for (int i = 0; i < 5; ++i) {
    layers.push_back(add_linear(owner, "depth" + std::to_string(i)));
  }
  return {.term = [=](const Tensor& rows, int64_t step) {
    Tensor h = rows.repeat({8, 1});
    for (uint64_t i = 0; i <= (static_cast<uint64_t>(step) * 2 + seed) % layers.size(); ++i) {
      h = torch::gelu(nn::Linear(layers[i])->forward(h)).exp().log1p();
    }
    return h.square().mean();
  }};
}

// As many rows as the values say.
inline Part rows_by_a_mask(nn::Module& owner, uint64_t) {
  const nn::Linear in = add_linear(owner, "mask_in"), out = add_linear(owner, "mask_out");
  return {.term = [=](const Tensor& rows, int64_t step) {
    const Tensor h = nn::Linear(in)->forward(rows.repeat({4, 1})).tanh();
    const Tensor chosen = h.index({h.select(1, 0) > 0.2 * static_cast<double>(step % 3) - 0.2});
    return nn::Linear(out)->forward(chosen.exp().tanh()).square().sum() / static_cast<double>(rows.size(0));
  }};
}

// Nobody sets its gradient to zero, so that it adds up over all steps.
inline Part leaf_outside(nn::Module&, uint64_t seed) {
  const Tensor leaf = torch::randn({kWidth, kWidth}).requires_grad_();
  if (seed % 2 == 0) {
    leaf.mutable_grad() = torch::ones_like(leaf);
  }
  return {.term = [=](const Tensor& rows, int64_t) { return rows.mm(leaf).tanh().square().mean(); },
          .state = [=] { return Tensors{leaf, leaf.grad()}; }};
}

// In a variable that each forward pass assigns anew: its values; with its graph; with its gradient.
inline Part kept_result(nn::Module& owner, uint64_t seed) {
  const nn::Linear layer = add_linear(owner, "kept");
  const auto kept = std::make_shared<Tensor>();
  const uint64_t how = seed % 3;
  return {.term =
              [=](const Tensor& rows, int64_t) {
                const Tensor h = nn::Linear(layer)->forward(rows.repeat({16, 1})).sigmoid();
                if (how == 2) {
                  h.retain_grad();
                }
                *kept = how == 0 ? h.detach() : h;
                return h.exp().tanh().square().mean();
              },
          .state = [=] { return how == 2 ? Tensors{*kept, kept->grad()} : Tensors{*kept}; }};
}

// A hook that computes with a result of the forward pass.
inline Part hook(nn::Module& owner, uint64_t) {
  const nn::Linear layer = add_linear(owner, "hooked");
  return {.term = [=](const Tensor& rows, int64_t) {
    const Tensor h = nn::Linear(layer)->forward(rows).tanh();
    h.register_hook([scale = h.detach().exp()](const Tensor& gradient) { return gradient / scale.add(1); });
    return h.square().mean();
  }};
}

struct Kind {
  const char* name;
  Part (*make)(nn::Module& owner, uint64_t seed);
};

inline constexpr Kind kKinds[] = {
    {"grown_buffer", grown_buffer},
    {"sparse_buffer", sparse_buffer},
    {"expanded_buffer", expanded_buffer},
    {"buffers_that_are_views", buffers_that_are_views},
    {"modes_of_children", modes_of_children},
    {"changing_depth", changing_depth},
    {"rows_by_a_mask", rows_by_a_mask},
    {"leaf_outside", leaf_outside},
    {"kept_result", kept_result},
    {"hook", hook},
};

}  // namespace snug::testing::loop_parts
