#include "snug/step/detail/step_to_plan.h"

#include <algorithm>

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

bool covers(const StepKind& large, const StepKind& small) {
  return large.is_training == small.is_training && large.trained == small.trained && covers(large.shape, small.shape);
}

}  // namespace snug::detail
