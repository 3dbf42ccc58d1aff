#pragma once
// The parameters of a GPT of 6 blocks with gradients, for optimizers to step on: 10.8 million in 75 tensors
// with d = 384.

#include <vector>

#include <torch/torch.h>

namespace snug::benchmarks {

// In the order of benchmarks/peers/optimizers.py.
inline std::vector<torch::Tensor> gpt_parameters(int64_t d, c10::Device device = torch::kCPU) {
  torch::manual_seed(1);
  std::vector<torch::Tensor> parameters{torch::randn({256, d}), torch::randn({256, d})};
  for (int block = 0; block < 6; ++block) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
             {d}, {d}, {3 * d, d}, {3 * d}, {d, d}, {d}, {d}, {d}, {4 * d, d}, {4 * d}, {d, 4 * d}, {d}}) {
      parameters.push_back(torch::randn(shape) * 0.02);
    }
  }
  parameters.push_back(torch::ones({d}));
  for (torch::Tensor& parameter : parameters) {
    parameter = parameter.to(device).requires_grad_();
    parameter.mutable_grad() = (torch::randn(parameter.sizes()) * 1e-3).to(device);
  }
  return parameters;
}

/// Between two and a half, so that gradients are unscaled in earnest and yet stay what they are.
inline double next_scale(double scale) { return 1 / scale; }

}  // namespace snug::benchmarks
