#pragma once
// Which rank keeps the optimizer state of which elements.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace snug::detail {

/// Elements [begin, end) of parameter number `parameter`, as they lie in memory.
struct ShardPiece {
  size_t parameter = 0;
  int rank = 0;
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const ShardPiece&) const = default;
};

struct ShardItem {
  int64_t elements = 0;
  int64_t bytes_each = 0;
};

/// Divides parameters among `ranks` so that each has as many bytes as the others, in the order of parameters and of elements. `cut` > 0: a
/// parameter is cut at multiples of it, so shares differ by no more than `cut` elements. 0: parameters stay whole; the largest first, each to the rank
/// that has least so far. Parameters without elements are nobody's.
std::vector<ShardPiece> shard_layout(const std::vector<ShardItem>& items, int ranks, int64_t cut);

}  // namespace snug::detail
