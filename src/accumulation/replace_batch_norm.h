#pragma once
// Replacement of a module's BatchNorms by other layers.

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/container/any.h>

#include "src/accumulation/batch_norm_layers.h"

namespace snug::detail {

/// The place of a BatchNorm: child `index` of `parent`, called `name` there and `path` from the root.
struct BatchNormPlace {
  torch::nn::Module* parent;
  size_t index;
  std::string name;
  std::string path;
  BatchNormLayer layer;
};

/// All places in `module`; two entries for a BatchNorm in two places. Throws ConfigError in the name of
/// `function` if there are none, or if `module` is a BatchNorm.
std::vector<BatchNormPlace> places_of_batch_norms(torch::nn::Module& module, const char* function);

/// The first place of a layer with an owner besides the layer's parents (a member or a variable). Such an owner would
/// continue to use the layer. Null if no layer has one.
const BatchNormPlace* first_held_elsewhere(const std::vector<BatchNormPlace>& places);

/// Puts `module` in `place`. `any`: the same module, for a Sequential to call.
void put_in_place(const BatchNormPlace& place, const std::shared_ptr<torch::nn::Module>& module,
                  torch::nn::AnyModule any);

}  // namespace snug::detail
