#pragma once
// Random small models for tests that must hold for any model: from a seed, a few blocks of kinds that make life hard
// for whoever drops and rebuilds activations (writes in place, views, random operators, shared weights, buffers,
// autocast, recurrent layers, derivatives in the forward pass, hooks ...).
//
//   RandomModel model = random_model(7);
//   torch::manual_seed(1);                    // for dropout
//   model.loss(model.input).backward();

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

namespace snug::testing {

/// A forward and backward pass takes milliseconds; its activations are 0.1 to 5 MB in storages of many sizes.
struct RandomModel {
  std::string description;                           ///< the seed, the input's shape and the kinds of blocks
  std::vector<std::string> kinds;                    ///< of the blocks, in order
  std::shared_ptr<torch::nn::Module> module;         ///< in training mode
  std::shared_ptr<std::vector<torch::Tensor>> kept;  ///< results of the last forward pass, with their graphs
  torch::Tensor input;                               ///< [batch, ...]; may require a gradient, may be token numbers
  std::function<torch::Tensor(torch::Tensor)> loss;  ///< a scalar, of the input or of some of its rows

  /// What receives gradients: parameters that are not frozen, and the input if it requires one.
  std::vector<torch::Tensor> leaves() const;
};

/// Equal to the bit for equal seeds. Sets torch's generators. As many seeds as there are kinds of blocks have every
/// kind.
RandomModel random_model(uint64_t seed);

/// All kinds of blocks there are.
std::vector<std::string> random_model_kinds();

}  // namespace snug::testing
