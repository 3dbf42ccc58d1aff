#include "src/planner/replay.h"

#include <numeric>

// A plan drops a storage, and backward asks for the storage. Simulator and tape must then run the same operators in the
// same order, and release each storage after the same operator. Otherwise predicted peaks are wrong. Two
// implementations of the rules could differ, so both callers use ReplayFinder and ReleaseOrder, over the interface
// ReplaySource.
//
// ReleaseOrder lists, for each operator of a replay, the storages that the operator is the last to need: a sort of
// `made` by `last`. A search sorts for every replay of every simulated plan, and positions are small numbers. So the
// sort counts: first the number of storages of each operator, then the sums at which each operator's part begins, then
// the storages themselves. While storages are put in, the beginning of each part moves to the part's end, so that
// ends_[k] is at last the end of part k.

namespace snug::plan {

void ReleaseOrder::sort(std::span<const MadeAgain> made, size_t operators) {
  ends_.assign(operators + 1, 0);
  for (const MadeAgain& one : made) {
    ends_[at(one.last) + 1] += one.stays ? 0 : 1;
  }
  std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
  by_last_.resize(at(ends_.back()));
  for (size_t i = 0; i < made.size(); ++i) {
    if (!made[i].stays) {
      by_last_[at(ends_[at(made[i].last)]++)] = static_cast<int>(i);  // from the beginning of the part to the end
    }
  }
}

}  // namespace snug::plan
