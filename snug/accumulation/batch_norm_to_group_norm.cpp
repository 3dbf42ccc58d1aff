#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/normalization.h>

#include "snug/accumulation/batch_norm.h"
#include "snug/accumulation/detail/batch_norm_layers.h"
#include "snug/core/error.h"

namespace snug {
namespace {

using detail::BatchNormLayer;
using torch::nn::Module;

// Where a BatchNorm hangs: child `index` of `parent`, called `name` there and `path` from the root.
struct Place {
  Module* parent;
  size_t index;
  std::string name;
  std::string path;
  BatchNormLayer layer;
};

void find(Module& parent, const std::string& prefix, std::unordered_set<const Module*>& seen,
          std::vector<Place>& places) {
  if (!seen.insert(&parent).second) {
    return;
  }
  size_t index = 0;
  for (const auto& child : parent.named_children()) {
    const std::string path = prefix + child.key();
    if (const auto layer = detail::as_batch_norm(*child.value())) {
      places.push_back({&parent, index, child.key(), path, *layer});
    } else {
      find(*child.value(), path + ".", seen, places);
    }
    ++index;
  }
}

bool is_container(const Module& module) {
  return dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr;
}

int64_t groups_of(int64_t channels, int64_t most) {
  int64_t groups = std::min(channels, most);
  while (channels % groups != 0) {
    --groups;
  }
  return groups;
}

// A layer is reached if nothing holds it but its parents: each once, and containers once more, in the list they dispatch by.
void check_reached(const std::vector<Place>& places, int64_t groups) {
  std::unordered_map<const Module*, long> holders;
  for (const Place& place : places) {
    holders[place.layer.module] += is_container(*place.parent) ? 2 : 1;
  }
  for (const Place& place : places) {
    const long others = place.layer.module->weak_from_this().use_count() - holders.at(place.layer.module);
    if (others > 0) {
      const int64_t channels = place.layer.options->num_features();
      const int64_t to = groups_of(channels, groups);
      throw ConfigError(fmt::format(
          "batch_norm_to_group_norm: '{0}' is held by a member or variable besides its module's list of children, "
          "which would go on using it; let go of the variable, or write in its module "
          "`torch::nn::GroupNorm {1}{{nullptr}};` and "
          "`{1} = register_module(\"{1}\", torch::nn::GroupNorm(torch::nn::GroupNormOptions({2}, {3})));`",
          place.path, place.name, to, channels));
    }
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

void replace(const Place& place, const torch::nn::GroupNorm& norm) {
  const auto index = static_cast<std::ptrdiff_t>(place.index);
  if (auto* dict = dynamic_cast<torch::nn::ModuleDictImpl*>(place.parent)) {
    dict->update({{place.name, norm.ptr()}});
    return;
  }
  if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(place.parent)) {
    *(sequential->begin() + index) = torch::nn::AnyModule(norm);
  } else if (auto* list = dynamic_cast<torch::nn::ModuleListImpl*>(place.parent)) {
    *(list->begin() + index) = norm.ptr();
  }
  place.parent->replace_module(place.name, norm.ptr());
}

}  // namespace

std::vector<GroupNormChange> batch_norm_to_group_norm(Module& module, int64_t groups) {
  if (groups < 1) {
    throw ConfigError(fmt::format("batch_norm_to_group_norm: groups is {}; give at least 1, such as 32", groups));
  }
  if (detail::as_batch_norm(module)) {
    throw ConfigError(
        "batch_norm_to_group_norm: the module is itself a BatchNorm; give the module that holds it, or make a "
        "torch::nn::GroupNorm");
  }
  std::vector<Place> places;
  std::unordered_set<const Module*> seen;
  find(module, "", seen, places);
  if (places.empty()) {
    throw ConfigError("batch_norm_to_group_norm: the module has no BatchNorm; leave the call out");
  }
  check_reached(places, groups);
  std::vector<GroupNormChange> changes;
  std::unordered_map<const Module*, torch::nn::GroupNorm> made;  // a layer in two places stays one
  for (const Place& place : places) {
    const int64_t channels = place.layer.options->num_features();
    const int64_t to = groups_of(channels, groups);
    made.try_emplace(place.layer.module, like(place.layer, to));
    changes.push_back({place.path, channels, to});
  }
  for (const Place& place : places) {
    replace(place, made.at(place.layer.module));
  }
  return changes;
}

}  // namespace snug
