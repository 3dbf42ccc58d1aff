#pragma once
// Small models of torch's own modules, with weights that depend on the seed alone.
//
//   auto model = make_mlp({4, 16, 16, 1});
//   Attention attention(/*width=*/8, /*dropout=*/0.1);

#include <cmath>
#include <cstdint>
#include <vector>

#include <torch/torch.h>

namespace snug::testing {

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
