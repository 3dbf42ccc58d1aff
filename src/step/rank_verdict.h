#pragma once
// The words of ranks in a step, the micro-batch that they come to, and their verdict if one of them has failed.
//
// With a memory_budget each rank has one to keep, and a share of the batch that may be larger or smaller than
// another's. A rank that must cut its share decides for those that need not, or could have larger parts: so the bits of
// a step depend on no rank's own measurements alone, and one saved choice is enough to make the same steps again.
// Slices (snug::sliced) are not agreed on: each rank has its own number, and gradients differ by rounding.

#include <cstdint>
#include <limits>
#include <vector>

#include "snug/core.h"

namespace snug::detail {

/// Why a rank gives up a step. The graver, the larger.
enum class RankFailure : int64_t {
  None,
  Other,        ///< any exception but the following
  TakesLess,    ///< it ran out of memory, but can make the step again with less
  OutOfMemory,  ///< it ran out of memory, and nothing is left to do about it
  LeftBehind,   ///< it failed while it wrote the last step, which the others made
};

/// The occasions on which ranks talk, in the order of a step.
enum class Talk {
  Split,    ///< with a memory_budget: the micro-batch that each has planned; again and again until all have the same
  Passes,   ///< where the model sends in forward: how many micro-batches each has
  Trained,  ///< where buckets are made anew: which parameters each trains
  Items,    ///< before the first backward: how many items each expects, and which parameters it trains
  Sums,     ///< after the last backward: items and losses
  Skip,     ///< with loss scaling: nothing, before the ranks agree on skipping the update
  Write,    ///< nothing, before the first parameter is written
};

/// What one rank has to say of the micro-batch.
struct RankSplit {
  static constexpr int64_t kWhole = std::numeric_limits<int64_t>::max();

  /// Items in its micro-batches, or that an earlier agreement allows; kWhole: it sees no need to cut.
  int64_t at_most = kWhole;
  int64_t batch = 0;       ///< items of its share
  int64_t is_planned = 0;  ///< 1: its plan for that is made; without items: there is none to make
};

struct AgreedSplit {
  int64_t at_most = RankSplit::kWhole;  ///< items in the micro-batches of every rank
  int64_t largest_batch = 0;
  bool is_settled = false;  ///< every rank's plan is for that; otherwise all plan for it, and say what came of it
};

/// The smallest that any has said.
AgreedSplit agree(const std::vector<RankSplit>& ranks);

/// The word of one rank, which travels as numbers of 8 bytes. Every talk carries all of it, so a rank that fails is
/// heard in the next talk, whichever it is.
struct RankWord {
  int64_t failure = 0;   // RankFailure
  int64_t smallest = 0;  // bytes that a failed rank needs; 0: it does not know
  int64_t trained = 0;   // a hash of what it trains
  int64_t passes = 0;    // micro-batches
  double items = 0;      // in Items, expected; in Sums, counted
  double loss_sum = 0;
  int64_t batch_items = 0;
  RankSplit split = {};
};

/// How the step goes, by the words of all ranks.
struct Verdict {
  RankFailure cause = RankFailure::None;  ///< the gravest
  bool is_unanimous = true;               ///< all that have failed name this cause
  std::vector<int64_t> ranks = {};        ///< that have failed
  Bytes smallest = Bytes(0);              ///< that would do on each of them; 0: one of them does not know
  /// All of them take less: every rank makes the step again.
  bool is_repeated() const { return cause == RankFailure::TakesLess && is_unanimous; }
};

/// `words`: of all ranks, in their order.
Verdict judge(const std::vector<RankWord>& words);

/// For a rank that has not failed itself. Throws BudgetExceeded if others ran out of memory, DistributedError if they
/// failed otherwise. No effect if nobody has failed.
void raise(const Verdict& verdict, Talk talk);

}  // namespace snug::detail
