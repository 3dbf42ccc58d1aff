#pragma once
// How the ranks of a data-parallel job come to one micro-batch, when each has a memory_budget to keep and a share of
// the batch that may be larger or smaller than another's. A rank that must cut its share decides for those that need
// not, or could have larger parts: so the bits of a step depend on no rank's own measurements alone, and one saved
// choice is enough to make the same steps again. Slices (snug::sliced) are not agreed on: each rank has its own number,
// and gradients differ by rounding.

#include <cstdint>
#include <limits>
#include <vector>

namespace snug::detail {

/// What one rank has to say.
struct RankSplit {
  static constexpr int64_t kWhole = std::numeric_limits<int64_t>::max();

  int64_t at_most =
      kWhole;  ///< items in its micro-batches, or that an earlier agreement allows; kWhole: it sees no need to cut
  int64_t batch = 0;        ///< items of its share
  bool is_planned = false;  ///< its plan for that is made; without items: there is none to make
};

struct AgreedSplit {
  int64_t at_most = RankSplit::kWhole;  ///< items in the micro-batches of every rank
  int64_t largest_batch = 0;
  bool is_settled = false;  ///< every rank's plan is for that; otherwise all plan for it, and say what came of it
};

/// The smallest that any has said.
AgreedSplit agree(const std::vector<RankSplit>& ranks);

}  // namespace snug::detail
