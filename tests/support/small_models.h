#pragma once
// Small models of torch's own modules, with weights that depend on the seed alone, and a batch for the smallest.
//
//   auto model = tiny_model();
//   const Loss loss = squared_error(model->forward(tiny_batch(8)[0]), tiny_batch(8)[1]);
//   auto mlp = make_mlp({4, 16, 16, 1});
//   Attention attention(/*width=*/8, /*dropout=*/0.1);

#include <cmath>
#include <cstdint>
#include <vector>

#include <torch/torch.h>

#include "snug/accumulation.h"

namespace snug::testing {

/// 6 -> 16 -> 16 -> 2, with dropout between if `dropout` is above 0. The same weights for the same seed.
inline torch::nn::Sequential tiny_model(double dropout = 0, uint64_t seed = 1) {
  torch::manual_seed(seed);
  torch::nn::Sequential model(torch::nn::Linear(6, 16), torch::nn::Tanh(), torch::nn::Dropout(dropout),
                              torch::nn::Linear(16, 16), torch::nn::Tanh(), torch::nn::Linear(16, 2));
  return model;
}

inline Batch tiny_batch(int64_t items, uint64_t seed = 2) {
  torch::manual_seed(seed);
  const auto x = torch::randn({items, 6});
  return Batch{x, x.slice(1, 0, 2).sin()};
}

inline Loss squared_error(const torch::Tensor& predicted, const torch::Tensor& target) {
  return Loss::sum((predicted.to(torch::kFloat) - target).square().sum(), target.numel());
}

/// Linear layers with GELU between them (and dropout after it, if p > 0).
inline torch::nn::Sequential make_mlp(const std::vector<int64_t>& sizes, double p = 0, uint64_t seed = 1) {
  torch::manual_seed(seed);
  torch::nn::Sequential model;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    model->push_back(torch::nn::Linear(sizes[i], sizes[i + 1]));
    if (i + 2 < sizes.size()) {
      model->push_back(torch::nn::GELU());
      if (p > 0) {
        model->push_back(torch::nn::Dropout(p));
      }
    }
  }
  return model;
}

/// x + projection(dropout(softmax(q k^T)) v) on [batch, time, width], in single operators.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(int64_t width, double p = 0)
      : norm(torch::nn::LayerNormOptions({width})), qkv(width, 3 * width), projection(width, width), dropout(p) {
    register_module("norm", norm);
    register_module("qkv", qkv);
    register_module("projection", projection);
    register_module("dropout", dropout);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = qkv->forward(norm->forward(x)).chunk(3, -1);
    const auto scores = torch::matmul(parts[0], parts[1].transpose(1, 2)) / std::sqrt(static_cast<double>(x.size(-1)));
    return x + projection->forward(torch::matmul(dropout->forward(torch::softmax(scores, -1)), parts[2]));
  }

  torch::nn::LayerNorm norm;
  torch::nn::Linear qkv, projection;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(Attention);

}  // namespace snug::testing
