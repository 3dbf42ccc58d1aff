#pragma once
// Putting other layers in the place of a module's BatchNorms.

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/container/any.h>

#include "snug/accumulation/detail/batch_norm_layers.h"

namespace snug::detail {

/// Where a BatchNorm hangs: child `index` of `parent`, called `name` there and `path` from the root.
struct BatchNormPlace {
  torch::nn::Module* parent;
  size_t index;
  std::string name;
  std::string path;
  BatchNormLayer layer;
};

/// All in `module`; one that hangs in two places, twice. Throws ConfigError in the name of `function` if there are none, or if `module` is one.
std::vector<BatchNormPlace> places_of_batch_norms(torch::nn::Module& module, const char* function);

/// The first place of a layer that something besides its parents holds, and would go on using: a member or a variable. Null if there is none.
const BatchNormPlace* first_held_elsewhere(const std::vector<BatchNormPlace>& places);

/// `any`: the same module, for a Sequential to call.
void put_in_place(const BatchNormPlace& place, const std::shared_ptr<torch::nn::Module>& module,
                  torch::nn::AnyModule any);

}  // namespace snug::detail
