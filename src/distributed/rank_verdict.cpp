#include "src/distributed/rank_verdict.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core.h"

namespace snug::detail {

AgreedSplit agree(const std::vector<RankSplit>& ranks) {
  AgreedSplit all{.is_settled = true};
  for (const RankSplit& rank : ranks) {
    all.at_most = std::min(all.at_most, rank.at_most);
    all.largest_batch = std::max(all.largest_batch, rank.batch);
    all.shards_weights = all.shards_weights || rank.has_no_plan != 0;
  }
  for (const RankSplit& rank : ranks) {
    const bool cuts_alike = std::min(rank.at_most, rank.batch) == std::min(all.at_most, rank.batch);
    all.is_settled = all.is_settled && rank.is_planned != 0 && cuts_alike && !all.shards_weights;
  }
  return all;
}

Verdict judge(const std::vector<RankWord>& words) {
  Verdict verdict;
  bool is_known = true;
  for (size_t rank = 0; rank < words.size(); ++rank) {
    const RankWord& word = words[rank];
    if (word.failure == static_cast<int64_t>(RankFailure::None)) {
      continue;
    }
    const auto cause = static_cast<RankFailure>(word.failure);
    verdict.is_unanimous = verdict.is_unanimous && (verdict.ranks.empty() || cause == verdict.cause);
    verdict.cause = std::max(verdict.cause, cause);
    verdict.ranks.push_back(static_cast<int64_t>(rank));
    verdict.smallest = std::max(verdict.smallest, Bytes(word.smallest));
    is_known = is_known && word.smallest > 0;
  }
  if (!is_known) {
    verdict.smallest = Bytes(0);
  }
  return verdict;
}

void raise(const Verdict& verdict, Talk talk) {
  const std::string who =
      fmt::format("rank{} {}", verdict.ranks.size() == 1 ? "" : "s", fmt::join(verdict.ranks, ", "));
  switch (verdict.cause) {
    case RankFailure::None:
      return;
    case RankFailure::LeftBehind:
      throw DistributedError(
          fmt::format("Stepper.step: {} failed while it made the last step, which the others made: their parameters "
                      "differ now; go on from a snapshot",
                      who));
    case RankFailure::Other:
      throw DistributedError(fmt::format(
          "Stepper.step: {} failed in this step, so all ranks dropped it; its own message is on its standard error",
          who));
    case RankFailure::TakesLess:
    case RankFailure::OutOfMemory:
      break;
  }
  const char* const see = verdict.ranks.size() == 1 ? "its own message is on its standard error"
                                                    : "their own messages are on their standard error";
  if (talk == Talk::Split && verdict.cause == RankFailure::OutOfMemory && verdict.is_unanimous) {
    const std::string cure =
        verdict.smallest.count() > 0
            ? fmt::format("{} ({} bytes) would do there", verdict.smallest.str(), verdict.smallest.count())
            : see;
    throw BudgetExceeded(
        fmt::format(
            "Stepper.step: {} found no way to make the step within the memory budget, so all ranks dropped it; {}", who,
            cure),
        verdict.smallest);
  }
  throw BudgetExceeded(
      fmt::format("Stepper.step: {} ran out of memory, so all ranks dropped this step; smaller micro-batches on all of "
                  "them, or a larger memory budget, may do",
                  who));
}

}  // namespace snug::detail
