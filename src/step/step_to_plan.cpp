#include "src/step/step_to_plan.h"

#include <algorithm>
#include <functional>
#include <string>

#include <c10/util/accumulate.h>
#include <torch/nn/module.h>

#include "src/core/fnv1a.h"
#include "src/precision/precision_regions.h"

namespace snug::detail {
namespace {

int64_t elements(const Batch::Shape& shape) {
  int64_t count = 0;
  for (const auto& [type, sizes] : shape.tensors) {
    count += c10::multiply_integers(sizes);
  }
  return count;
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

StepMemory StepCounts::memory(Placement placement) const {
  StepMemory memory{.fixed = fixed_bytes + effect_bytes, .gradients = gradient_bytes, .workspace = optimizer_bytes};
  if (placement.state == Place::File) {
    memory.fixed -= std::max<int64_t>(0, state_in_file.saved() - idle_state_bytes);
    memory.workspace = state_in_file.workspace;
  }
  if (placement.model == Place::File) {
    memory.fixed -= model_in_file.saved();
    memory.gradients = 0;
  }
  return memory;
}

std::optional<double> growth(const StepKind& planned, int64_t items, bool is_cut, const StepToPlan& step) {
  const auto &from = planned.shape.tensors, &to = step.kind.shape.tensors;
  const int64_t batch = step.counts.batch;
  const int64_t at_once = std::min(batch, step.micro_batch > 0 ? step.micro_batch : is_cut ? items : batch);
  if (planned.modes != step.kind.modes || planned.trained != step.kind.trained || from.size() != to.size() ||
      (!is_cut && (at_once < batch || batch > items))) {
    return std::nullopt;
  }
  double largest = 0;
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i].first != to[i].first || from[i].second.size() != to[i].second.size()) {
      return std::nullopt;
    }
    const auto elements = [](const std::vector<int64_t>& sizes, int64_t count) {
      return static_cast<double>(c10::multiply_integers(sizes)) * static_cast<double>(count);
    };
    largest = std::max(largest, elements(to[i].second, at_once) / std::max(1.0, elements(from[i].second, items)));
  }
  return largest;
}

bool covers(const StepKind& large, const StepKind& small) {
  const auto is_no_smaller = [](const auto& a, const auto& b) {
    return a.first == b.first &&
           std::equal(a.second.begin(), a.second.end(), b.second.begin(), b.second.end(), std::greater_equal<>());
  };
  return large == small || (large.modes == small.modes && large.trained == small.trained &&
                            std::equal(large.shape.tensors.begin(), large.shape.tensors.end(),
                                       small.shape.tensors.begin(), small.shape.tensors.end(), is_no_smaller) &&
                            5 * elements(large.shape) <= 6 * elements(small.shape));
}

}  // namespace snug::detail
