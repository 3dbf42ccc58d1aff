#include <algorithm>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/modules/normalization.h>

#include "snug/core.h"
#include "snug/extra/batch_norm.h"
#include "src/accumulation/replace_batch_norm.h"

namespace snug {
namespace {

using detail::BatchNormLayer;
using detail::BatchNormPlace;
using torch::nn::Module;

int64_t groups_of(int64_t channels, int64_t most) {
  int64_t groups = std::min(channels, most);
  while (channels % groups != 0) {
    --groups;
  }
  return groups;
}

void check_reached(const std::vector<BatchNormPlace>& places, int64_t groups) {
  if (const BatchNormPlace* place = detail::first_held_elsewhere(places)) {
    const int64_t channels = place->layer.options->num_features();
    throw ConfigError(fmt::format(
        "batch_norm_to_group_norm: '{0}' is held by a member or variable besides its module's list of children, which "
        "would go on using it; let go of the variable, or write in its module `torch::nn::GroupNorm {1}{{nullptr}};` "
        "and `{1} = register_module(\"{1}\", torch::nn::GroupNorm(torch::nn::GroupNormOptions({2}, {3})));`",
        place->path, place->name, groups_of(channels, groups), channels));
  }
}

torch::nn::GroupNorm like(const BatchNormLayer& layer, int64_t groups) {
  torch::nn::GroupNorm norm(torch::nn::GroupNormOptions(groups, layer.options->num_features())
                                .eps(layer.options->eps())
                                .affine(layer.weight->defined()));
  if (layer.weight->defined()) {
    const at::NoGradGuard no_grad;
    norm->to(layer.weight->device(), layer.weight->scalar_type());
    norm->weight.copy_(*layer.weight).set_requires_grad(layer.weight->requires_grad());
    norm->bias.copy_(*layer.bias).set_requires_grad(layer.bias->requires_grad());
  }
  norm->train(layer.module->is_training());
  return norm;
}

}  // namespace

std::vector<GroupNormChange> batch_norm_to_group_norm(Module& module, int64_t groups) {
  if (groups < 1) {
    throw ConfigError(fmt::format("batch_norm_to_group_norm: groups is {}; give at least 1, such as 32", groups));
  }
  const auto places = detail::places_of_batch_norms(module, "batch_norm_to_group_norm");
  check_reached(places, groups);
  std::vector<GroupNormChange> changes;
  std::unordered_map<const Module*, torch::nn::GroupNorm> made;  // a layer in two places stays one
  for (const BatchNormPlace& place : places) {
    const int64_t channels = place.layer.options->num_features();
    const int64_t to = groups_of(channels, groups);
    made.try_emplace(place.layer.module, like(place.layer, to));
    changes.push_back({place.path, channels, to});
  }
  for (const BatchNormPlace& place : places) {
    const auto& norm = made.at(place.layer.module);
    detail::put_in_place(place, norm.ptr(), torch::nn::AnyModule(norm));
  }
  return changes;
}

}  // namespace snug
