#include "src/step/step_to_plan.h"

#include <algorithm>
#include <functional>
#include <vector>

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

// Whether the steps differ in the sizes of tensors alone, and are_like(sizes, sizes) holds for each pair of tensors.
template <class AreLike>
bool are_alike(const StepKind& one, const StepKind& other, const AreLike& are_like) {
  return one.modes == other.modes && one.trained == other.trained &&
         std::ranges::equal(one.shape.tensors, other.shape.tensors, [&](const auto& a, const auto& b) {
           return a.first == b.first && are_like(a.second, b.second);
         });
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
  if (placement.state != Place::Memory) {
    memory.fixed -= std::max<int64_t>(0, state_in_file.saved() - idle_state_bytes);
    memory.workspace = state_in_file.workspace;
  }
  if (placement.model != Place::Memory) {
    memory.fixed -= model_in_file.saved();
    memory.gradients = 0;
  }
  return memory;
}

std::optional<double> growth(const StepKind& planned, int64_t items, bool is_cut, const StepToPlan& step) {
  const int64_t batch = step.counts.batch;
  const int64_t at_once = std::min(batch, step.micro_batch > 0 ? step.micro_batch : is_cut ? items : batch);
  double largest = 0;
  const auto compare = [&](const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
    const auto elements = [](const std::vector<int64_t>& sizes, int64_t count) {
      return static_cast<double>(c10::multiply_integers(sizes)) * static_cast<double>(count);
    };
    largest = std::max(largest, elements(to, at_once) / std::max(1.0, elements(from, items)));
    return from.size() == to.size();
  };
  const bool has_room = is_cut || (at_once == batch && batch <= items);
  return has_room && are_alike(planned, step.kind, compare) ? std::optional(largest) : std::nullopt;
}

bool covers(const StepKind& large, const StepKind& small) {
  const auto is_no_smaller = [](const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
    return std::ranges::equal(a, b, std::greater_equal<>());
  };
  return are_alike(large, small, is_no_smaller) && 5 * elements(large.shape) <= 6 * elements(small.shape);
}

}  // namespace snug::detail
