#include "src/accumulation/batch_norm_layers.h"

#include <unordered_set>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {
namespace {

template <class BatchNorm>
std::optional<BatchNormLayer> as(torch::nn::Module& module) {
  auto* norm = dynamic_cast<BatchNorm*>(&module);
  if (norm == nullptr) {
    return std::nullopt;
  }
  return BatchNormLayer{norm,
                        &norm->options,
                        &norm->weight,
                        &norm->bias,
                        &norm->running_mean,
                        &norm->running_var,
                        &norm->num_batches_tracked};
}

}  // namespace

std::optional<BatchNormLayer> as_batch_norm(torch::nn::Module& module) {
  if (auto one = as<torch::nn::BatchNorm1dImpl>(module)) {
    return one;
  }
  if (auto two = as<torch::nn::BatchNorm2dImpl>(module)) {
    return two;
  }
  return as<torch::nn::BatchNorm3dImpl>(module);
}

std::vector<BatchNormLayer> batch_norm_layers(torch::nn::Module& module) {
  std::vector<BatchNormLayer> found;
  std::unordered_set<const void*> seen;  // a module that is used twice is listed twice
  module.apply([&](torch::nn::Module& each) {
    const auto layer = as_batch_norm(each);
    if (layer && seen.insert(layer->module).second) {
      found.push_back(*layer);
    }
  });
  return found;
}

std::vector<BatchNormLayer> layers_with_statistics(torch::nn::Module& module, const char* function) {
  auto layers = batch_norm_layers(module);
  std::erase_if(layers, [](const BatchNormLayer& layer) { return !layer.running_mean->defined(); });
  if (layers.empty()) {
    throw ConfigError(
        fmt::format("{}: the module has no BatchNorm with running statistics; leave the call out", function));
  }
  return layers;
}

}  // namespace snug::detail
