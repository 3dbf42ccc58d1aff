#pragma once
// What tests of optimizers need: parameters, gradients that depend on a seed alone, and the tensors of a state.
//
//   const auto p = random_parameters();
//   AdamW optimizer(p);
//   train(optimizer, p, 1, 3);       // three steps
//   const auto before = tensors_in(optimizer.state_dict());

#include <cstdint>
#include <variant>
#include <vector>

#include <torch/torch.h>

#include "snug/optimizer.h"
#include "snug/state.h"

namespace snug::testing {

/// A matrix, a vector and a scalar; the same every time.
inline std::vector<torch::Tensor> random_parameters(c10::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(1);
  return {torch::randn({5, 7}).to(dtype).requires_grad_(), torch::randn({64}).to(dtype).requires_grad_(),
          torch::randn({}).to(dtype).requires_grad_()};
}

/// Tensors that threads share, smaller ones, and one that does not lie in the order of its dimensions; with gradients
/// in the parameters' own order.
inline std::vector<torch::Tensor> large_parameters() {
  torch::manual_seed(5);
  std::vector<torch::Tensor> parameters{torch::randn({100'003}), torch::randn({7}), torch::randn({3, 33'000}),
                                        torch::randn({4, 32, 20, 21}).contiguous(torch::MemoryFormat::ChannelsLast)};
  for (torch::Tensor& parameter : parameters) {
    parameter.set_requires_grad(true);
    parameter.mutable_grad() = torch::empty_like(parameter).normal_();
  }
  return parameters;
}

inline void set_gradients(const std::vector<torch::Tensor>& parameters, uint64_t seed, double factor = 1) {
  torch::manual_seed(seed);
  for (const torch::Tensor& parameter : parameters) {
    parameter.mutable_grad() =
        (torch::randn(parameter.sizes()) * factor).to(parameter.scalar_type()).to(parameter.device());
  }
}

/// A step with the gradients of each seed from `first` to `last`.
inline void train(torch::optim::Optimizer& optimizer, const std::vector<torch::Tensor>& parameters, uint64_t first,
                  uint64_t last) {
  for (uint64_t seed = first; seed <= last; ++seed) {
    set_gradients(parameters, seed);
    optimizer.step();
  }
}

/// All tensors of a state, in order, copied.
inline std::vector<torch::Tensor> tensors_in(const StateDict& state) {
  std::vector<torch::Tensor> result;
  for (const auto& entry : state.entries()) {
    if (const auto* tensor = std::get_if<torch::Tensor>(&entry.value)) {
      result.push_back(tensor->clone());
    } else if (const auto* inner = std::get_if<StateDict>(&entry.value)) {
      const auto more = tensors_in(*inner);
      result.insert(result.end(), more.begin(), more.end());
    }
  }
  return result;
}

inline bool is_in_file(const MovableState& optimizer) {
  return std::holds_alternative<StateFile>(optimizer.state_placement());
}

}  // namespace snug::testing
