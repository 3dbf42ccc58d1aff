#pragma once
// Mlp: a plain multi-layer perceptron, the model of the small experiments.
//
//   snug::Mlp model(snug::MlpOptions{.sizes = {1, 64, 64, 1}});
//   torch::Tensor y = model->forward(x);     // [batch, 1] -> [batch, 1]

#include <cstdint>
#include <vector>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

namespace snug {

/// The function between the layers.
enum class MlpActivation { Relu, Gelu, Tanh, Silu };

struct MlpOptions {
  /// Width of the input, of each hidden layer and of the output: at least two numbers, each >= 1.
  std::vector<int64_t> sizes;
  /// Between the layers, not after the last one. Tanh suits smooth functions of few inputs.
  MlpActivation activation = MlpActivation::Relu;
};

/// Linear layers with torch's own initialisation, drawn from torch's default generator. The parameters' names are
/// layers.0.weight, layers.0.bias, ...
class MlpImpl : public torch::nn::Module {
 public:
  /// Throws ConfigError for bad sizes.
  explicit MlpImpl(MlpOptions options);

  /// [..., sizes.front()] -> [..., sizes.back()].
  torch::Tensor forward(torch::Tensor x);

  const MlpOptions options;
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Mlp);

}  // namespace snug
