#pragma once
// The BatchNorms of a module. LibTorch's three classes have no common base that is independent of the class itself (it
// is a template of each).

#include <optional>
#include <vector>

#include <torch/nn/modules/batchnorm.h>

namespace snug::detail {

/// A view of a BatchNorm1d, 2d or 3d, or of a class derived from those.
struct BatchNormLayer {
  torch::nn::Module* module;
  torch::nn::BatchNormOptions* options;
  at::Tensor* weight;
  at::Tensor* bias;
  at::Tensor* running_mean;  // undefined without running statistics, as the following two
  at::Tensor* running_var;
  at::Tensor* num_batches_tracked;
};

/// The view of `module`; empty if it is not a BatchNorm itself.
std::optional<BatchNormLayer> as_batch_norm(torch::nn::Module& module);

/// All BatchNorms in `module`, each once, in the order of Module::modules().
std::vector<BatchNormLayer> batch_norm_layers(torch::nn::Module& module);

/// All BatchNorms with running statistics. Throws ConfigError in the name of `function` if there are none.
std::vector<BatchNormLayer> layers_with_statistics(torch::nn::Module& module, const char* function);

}  // namespace snug::detail
