#include "snug/extra/batch_norm.h"

#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/accumulation/batch_norm_layers.h"

namespace snug {
namespace {

std::vector<torch::nn::BatchNormOptions*> adjustable(torch::nn::Module& module) {
  std::vector<torch::nn::BatchNormOptions*> found;
  for (const auto& layer : detail::batch_norm_layers(module)) {
    if (layer.options->track_running_stats() && layer.options->momentum()) {
      found.push_back(layer.options);
    }
  }
  return found;
}

}  // namespace

double adjust_batch_norm_momentum(torch::nn::Module& module, int64_t micro_batches) {
  if (micro_batches < 1) {
    throw ConfigError(fmt::format(
        "adjust_batch_norm_momentum: micro_batches is {}; give the micro-batches per optimizer step, at least 1",
        micro_batches));
  }
  const auto found = adjustable(module);
  if (found.empty()) {
    throw ConfigError(
        "adjust_batch_norm_momentum: the module has no BatchNorm with running statistics and a momentum; leave the "
        "call out");
  }
  for (const auto* options : found) {
    const double momentum = *options->momentum();
    if (!(momentum >= 0 && momentum <= 1)) {
      throw ConfigError(fmt::format("adjust_batch_norm_momentum: a momentum is {}; it must be from 0 to 1", momentum));
    }
  }
  if (micro_batches > 1) {
    for (auto* options : found) {
      // 1 - (1 - m)^(1 / K) without losing the digits of a small m.
      options->momentum(-std::expm1(std::log1p(-*options->momentum()) / static_cast<double>(micro_batches)));
    }
  }
  return *found.front()->momentum();
}

FrozenBatchNorm::FrozenBatchNorm(torch::nn::Module& module) {
  for (const auto& layer : detail::layers_with_statistics(module, "FrozenBatchNorm")) {
    if (layer.module->is_training()) {
      layer.module->eval();
      were_training_.push_back(layer.module->shared_from_this());
    }
  }
}

FrozenBatchNorm::~FrozenBatchNorm() {
  for (const auto& layer : were_training_) {
    layer->train();
  }
}

}  // namespace snug
