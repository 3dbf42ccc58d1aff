#include "snug/step/detail/step_to_plan.h"

#include <algorithm>
#include <string>

#include <torch/nn/module.h>

#include "snug/core/detail/fnv1a.h"
#include "snug/precision/detail/precision_regions.h"

namespace snug::detail {
namespace {

int64_t elements(const BatchShape& shape) {
  int64_t count = 0;
  for (const auto& [type, sizes] : shape.tensors) {
    int64_t of_one = 1;
    for (const int64_t size : sizes) {
      of_one *= size;
    }
    count += of_one;
  }
  return count;
}

// Whether a plan for batches of shape `large` will do for `small`: no side is longer, and not much is wasted.
bool covers(const BatchShape& large, const BatchShape& small) {
  if (large == small) {
    return true;
  }
  if (large.tensors.size() != small.tensors.size()) {
    return false;
  }
  for (size_t i = 0; i < large.tensors.size(); ++i) {
    const auto& [large_type, large_sizes] = large.tensors[i];
    const auto& [small_type, small_sizes] = small.tensors[i];
    if (large_type != small_type || large_sizes.size() != small_sizes.size() ||
        !std::equal(large_sizes.begin(), large_sizes.end(), small_sizes.begin(), std::greater_equal<>())) {
      return false;
    }
  }
  return 5 * elements(large) <= 6 * elements(small);
}

}  // namespace

uint32_t modes_of(const torch::nn::Module& model, const PrecisionRegions* regions) {
  std::string modes;
  model.apply([&](const torch::nn::Module& module) { modes += module.is_training() ? 'T' : 'E'; });
  uint32_t hash = fnv1a(modes);
  if (regions != nullptr) {
    for (const std::string& region : regions->in_full) {
      hash = fnv1a("\n", fnv1a(region, hash));
    }
  }
  return hash;
}

bool covers(const StepKind& large, const StepKind& small) {
  return large.modes == small.modes && large.trained == small.trained && covers(large.shape, small.shape);
}

}  // namespace snug::detail
