#include "snug/accumulation/batch_norm.h"

#include <cmath>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>
#include <torch/nn/modules/batchnorm.h>

#include "snug/core/error.h"

namespace snug {
namespace {

torch::nn::BatchNormOptions* options_of(torch::nn::Module& module) {
  if (auto* one = dynamic_cast<torch::nn::BatchNorm1dImpl*>(&module)) {
    return &one->options;
  }
  if (auto* two = dynamic_cast<torch::nn::BatchNorm2dImpl*>(&module)) {
    return &two->options;
  }
  auto* three = dynamic_cast<torch::nn::BatchNorm3dImpl*>(&module);
  return three == nullptr ? nullptr : &three->options;
}

std::vector<torch::nn::BatchNormOptions*> adjustable(torch::nn::Module& module) {
  std::vector<torch::nn::BatchNormOptions*> found;
  std::unordered_set<const void*> seen;  // a module that is used twice is listed twice
  module.apply([&](torch::nn::Module& each) {
    torch::nn::BatchNormOptions* options = options_of(each);
    if (options != nullptr && options->track_running_stats() && options->momentum() && seen.insert(options).second) {
      found.push_back(options);
    }
  });
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

}  // namespace snug
