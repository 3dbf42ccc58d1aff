#include "program/models/mlp.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/linear.h>

#include "snug/core.h"

namespace snug {
namespace {

torch::Tensor activate(const torch::Tensor& x, MlpActivation activation) {
  switch (activation) {
    case MlpActivation::Relu:
      return at::relu(x);
    case MlpActivation::Gelu:
      return at::gelu(x);
    case MlpActivation::Tanh:
      return at::tanh(x);
    case MlpActivation::Silu:
      return at::silu(x);
  }
  throw ConfigError("Mlp: the activation is none of MlpActivation's values");
}

}  // namespace

MlpImpl::MlpImpl(MlpOptions with) : options(std::move(with)) {
  const auto& sizes = options.sizes;
  if (sizes.size() < 2 || std::any_of(sizes.begin(), sizes.end(), [](auto n) { return n < 1; })) {
    throw ConfigError(
        fmt::format("Mlp: sizes are [{}]; give the widths of input, hidden layers and output, each at least 1",
                    fmt::join(sizes, ", ")));
  }
  layers = register_module("layers", torch::nn::ModuleList());
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    layers->push_back(torch::nn::Linear(sizes[i], sizes[i + 1]));
  }
}

torch::Tensor MlpImpl::forward(torch::Tensor x) {
  for (size_t i = 0; i < layers->size(); ++i) {
    x = layers[i]->as<torch::nn::Linear>()->forward(x);
    if (i + 1 < layers->size()) {
      x = activate(x, options.activation);
    }
  }
  return x;
}

}  // namespace snug
