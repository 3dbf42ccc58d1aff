#pragma once
// The reports of ranks in a step, the micro-batch that follows from the reports, and the decision if a rank has failed.
// ranked_step.cpp opens with how a rank fails.
//
// With a memory budget each rank has a budget to keep, and a share of the batch that may be larger or smaller than
// another rank's share. A rank that must cut its share decides for ranks that need not cut, or could have larger parts.
// So the bits of a step never depend on one rank's measurements alone, and one saved choice is enough to make the same
// steps again. Slices (snug::sliced) are not agreed on: each rank has its own number, and gradients differ by rounding.

#include <cstdint>
#include <vector>

#include "snug/core.h"
#include "src/step/step_ranks.h"

namespace snug::detail {

/// The exchanges of the ranks, in the order of a step.
enum class Talk {
  Split,    ///< in step(), with a budget: the micro-batch that each rank has planned, repeated until all ranks agree
  Trained,  ///< if buckets are made again: the parameters that each rank trains
  Passes,   ///< in step(), if the model sends in forward: the number of micro-batches of each rank
  Items,    ///< before the first backward: the items that each rank expects, and the parameters that each rank trains
  Sums,     ///< after the last backward: items and losses
  Skip,     ///< with loss scaling: nothing, before the ranks agree on skipping the update
  Norm,     ///< with gradients in shards: nothing, before the ranks put the norm together
  Write,    ///< nothing, before the first parameter is written; snug's optimizers have all their memory by then
};

/// The smallest micro-batch of all reports.
AgreedSplit agree(const std::vector<RankSplit>& ranks);

/// The report of one rank, sent as numbers of 8 bytes. Every exchange carries all fields, so a rank that fails is heard
/// in the next exchange, whichever exchange comes next.
struct RankWord {
  int64_t failure = 0;   // RankFailure
  int64_t smallest = 0;  // bytes that a failed rank needs; 0: unknown
  int64_t trained = 0;   // a hash of the trained parameters
  int64_t passes = 0;    // micro-batches
  double items = 0;      // in Items, expected; in Sums, counted
  double loss_sum = 0;   // of losses on the CPU
  int64_t batch_items = 0;
  int64_t metrics = 0;  // a hash of the metrics' names; 0: no metrics, or no items
  RankSplit split = {};
};

/// The decision on a step, by the reports of all ranks.
struct Verdict {
  RankFailure cause = RankFailure::None;  ///< the gravest cause
  bool is_unanimous = true;               ///< all failed ranks report this cause
  std::vector<int64_t> ranks = {};        ///< the failed ranks
  Bytes smallest = Bytes(0);              ///< a budget sufficient for each failed rank; 0: unknown to a failed rank
  /// All failed ranks can do with less: every rank repeats the step.
  bool is_repeated() const { return cause == RankFailure::TakesLess && is_unanimous; }
};

/// `words`: the reports of all ranks, in the order of ranks.
Verdict judge(const std::vector<RankWord>& words);

/// For a rank that has not failed itself. Throws BudgetExceeded if other ranks ran out of memory, DistributedError if
/// other ranks failed otherwise. No effect if no rank has failed.
void raise(const Verdict& verdict, Talk talk);

}  // namespace snug::detail
