#include "snug/step/detail/rank_split.h"

#include <algorithm>

namespace snug::detail {

AgreedSplit agree(const std::vector<RankSplit>& ranks) {
  AgreedSplit all{.is_settled = true};
  for (const RankSplit& rank : ranks) {
    all.at_most = std::min(all.at_most, rank.at_most);
    all.largest_batch = std::max(all.largest_batch, rank.batch);
  }
  for (const RankSplit& rank : ranks) {
    const bool cuts_alike = std::min(rank.at_most, rank.batch) == std::min(all.at_most, rank.batch);
    all.is_settled = all.is_settled && rank.is_planned && cuts_alike;
  }
  return all;
}

}  // namespace snug::detail
