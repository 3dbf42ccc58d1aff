#pragma once
// A model and data small enough that a test takes milliseconds.

#include <vector>

#include <torch/torch.h>

#include "snug/accumulation/loss.h"
#include "snug/accumulation/micro_batch.h"

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

/// Largest 2-norm of a difference, relative to the norm of the tensor in `b`.
inline double relative_difference(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, ((a[i] - b[i]).norm() / b[i].norm()).item<double>());
  }
  return most;
}

}  // namespace snug::testing
