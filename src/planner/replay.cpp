#include "src/planner/replay.h"

#include <numeric>

namespace snug::detail {

// By counting.
void ReleaseOrder::sort(const std::vector<MadeAgain>& made, size_t operators) {
  ends_.assign(operators + 1, 0);
  for (const MadeAgain& one : made) {
    ends_[at(one.last) + 1] += one.stays ? 0 : 1;
  }
  std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
  by_last_.resize(at(ends_.back()));
  for (size_t i = 0; i < made.size(); ++i) {
    if (!made[i].stays) {
      by_last_[at(ends_[at(made[i].last)]++)] = static_cast<int>(i);  // from the beginning of its part to the end
    }
  }
}

}  // namespace snug::detail
