#include "src/accumulation/replace_batch_norm.h"

#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "snug/core.h"

namespace snug::detail {
namespace {

using torch::nn::Module;

void find(Module& parent, const std::string& prefix, std::unordered_set<const Module*>& seen,
          std::vector<BatchNormPlace>& places) {
  if (!seen.insert(&parent).second) {
    return;
  }
  size_t index = 0;
  for (const auto& child : parent.named_children()) {
    const std::string path = prefix + child.key();
    if (const auto layer = as_batch_norm(*child.value())) {
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

}  // namespace

std::vector<BatchNormPlace> places_of_batch_norms(Module& module, const char* function) {
  if (as_batch_norm(module)) {
    throw ConfigError(fmt::format(
        "{}: the module is itself a BatchNorm; give the module that holds it, or make the other layer yourself",
        function));
  }
  std::vector<BatchNormPlace> places;
  std::unordered_set<const Module*> seen;
  find(module, "", seen, places);
  if (places.empty()) {
    throw ConfigError(fmt::format("{}: the module has no BatchNorm; leave the call out", function));
  }
  return places;
}

// A layer is reached if nothing holds it but its parents: each once, and containers once more, in the list they
// dispatch by.
const BatchNormPlace* first_held_elsewhere(const std::vector<BatchNormPlace>& places) {
  std::unordered_map<const Module*, long> holders;
  for (const BatchNormPlace& place : places) {
    holders[place.layer.module] += is_container(*place.parent) ? 2 : 1;
  }
  for (const BatchNormPlace& place : places) {
    if (place.layer.module->weak_from_this().use_count() > holders.at(place.layer.module)) {
      return &place;
    }
  }
  return nullptr;
}

void put_in_place(const BatchNormPlace& place, const std::shared_ptr<Module>& module, torch::nn::AnyModule any) {
  const auto index = static_cast<std::ptrdiff_t>(place.index);
  if (auto* dict = dynamic_cast<torch::nn::ModuleDictImpl*>(place.parent)) {
    dict->update({{place.name, module}});
    return;
  }
  if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(place.parent)) {
    *(sequential->begin() + index) = std::move(any);
  } else if (auto* list = dynamic_cast<torch::nn::ModuleListImpl*>(place.parent)) {
    *(list->begin() + index) = module;
  }
  place.parent->replace_module(place.name, module);
}

}  // namespace snug::detail
