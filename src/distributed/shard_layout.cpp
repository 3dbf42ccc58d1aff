#include "src/distributed/shard_layout.h"

#include <algorithm>
#include <numeric>

namespace snug::detail {
namespace {

int64_t bytes_of(const ShardItem& item) { return item.elements * item.bytes_each; }

std::vector<ShardPiece> whole_parameters(const std::vector<ShardItem>& items, int ranks) {
  std::vector<size_t> order(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return bytes_of(items[a]) > bytes_of(items[b]); });
  std::vector<int64_t> load(static_cast<size_t>(ranks));
  std::vector<ShardPiece> pieces;
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += bytes_of(items[i]);
    if (items[i].elements > 0) {
      pieces.push_back({i, static_cast<int>(least - load.begin()), 0, items[i].elements});
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.parameter < b.parameter; });
  return pieces;
}

}  // namespace

std::vector<ShardPiece> shard_layout(const std::vector<ShardItem>& items, int ranks, int64_t cut) {
  if (cut == 0) {
    return whole_parameters(items, ranks);
  }
  const int64_t total = std::accumulate(items.begin(), items.end(), int64_t{0},
                                        [](int64_t sum, const ShardItem& item) { return sum + bytes_of(item); });
  std::vector<ShardPiece> pieces;
  int64_t start = 0;  // bytes of the parameters before items[i]
  int rank = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    int64_t begin = 0;
    while (begin < items[i].elements) {
      int64_t end = items[i].elements;
      if (rank + 1 < ranks) {
        const int64_t share_ends = total / ranks * (rank + 1) + total % ranks * (rank + 1) / ranks;
        const int64_t elements = std::max<int64_t>(0, share_ends - start) / items[i].bytes_each;
        const int64_t multiple = items[i].may_be_cut ? cut : end;
        end = std::clamp((elements + multiple / 2) / multiple * multiple, begin, end);
      }
      if (end > begin) {
        pieces.push_back({i, rank, begin, end});
      }
      rank += end < items[i].elements ? 1 : 0;
      begin = end;
    }
    start += bytes_of(items[i]);
  }
  return pieces;
}

}  // namespace snug::detail
