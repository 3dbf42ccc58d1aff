#include "program/run/run_ranks.h"

#include <ATen/ops/full.h>
#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {

RunRanks::RunRanks(std::shared_ptr<ProcessGroup> group) {
  if (group != nullptr && group->size() > 1) {
    group_ = std::move(group);
  }
}

double RunRanks::sum(double value) const {
  if (!group_) {
    return value;
  }
  const at::Tensor total = at::full({1}, value, at::kDouble);
  group_->all_reduce(total);
  return total.item<double>();
}

bool RunRanks::any(bool value) const { return group_ ? sum(value ? 1 : 0) > 0 : value; }

void RunRanks::check_same_step(int64_t step) const {
  if (!group_) {
    return;
  }
  const at::Tensor steps = group_->all_gather(at::full({1}, step, at::kLong));
  for (int64_t rank = 0; rank < group_->size(); ++rank) {
    if (const int64_t other = steps[rank].item<int64_t>(); other != steps[0].item<int64_t>()) {
      throw ConfigError(
          fmt::format("train: rank {} found the snapshot of step {}, rank 0 that of step {}; do all ranks see the same "
                      "run folder?",
                      rank, other, steps[0].item<int64_t>()));
    }
  }
}

}  // namespace snug::detail
