#pragma once
// A small model and its gradients, with saved-tensor hooks and without.

#include <vector>

#include <torch/torch.h>

#include "snug/memory.h"
#include "tests/support/tensors.h"

namespace snug::testing {

inline torch::nn::Sequential make_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::Tanh(),
                               torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})), torch::nn::GELU(),
                               torch::nn::Linear(8, 5), torch::nn::Softmax(-1), torch::nn::Linear(5, 1));
}

inline std::vector<torch::Tensor> plain_gradients() {
  auto model = make_model();
  model->forward(torch::ones({4, 6})).sum().backward();
  return gradients_of(*model);
}

template <class Pack, class Unpack>
std::vector<torch::Tensor> gradients_with(Pack pack, Unpack unpack) {
  auto model = make_model();
  torch::Tensor loss;
  {
    const SavedTensorHooks hooks(pack, unpack);
    loss = model->forward(torch::ones({4, 6})).sum();
  }
  loss.backward();
  return gradients_of(*model);
}

}  // namespace snug::testing
