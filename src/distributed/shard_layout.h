#pragma once
// The division of the optimizer state among the ranks.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace snug::detail {

/// Elements [begin, end) of parameter number `parameter`, in the order of the parameter's memory.
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
  bool may_be_cut = true;
};

/// Divides parameters among `ranks`, in the order of parameters and of elements, so that all ranks have about the same
/// number of bytes.
/// - `cut` > 0: a parameter is cut at multiples of `cut`, so shares differ by at most `cut` elements, and by parameters
///   that may not be cut.
/// - `cut` = 0: parameters stay whole. The largest parameters come first, each to the rank with the fewest bytes so
///   far.
/// - Parameters without elements belong to no rank.
std::vector<ShardPiece> shard_layout(const std::vector<ShardItem>& items, int ranks, int64_t cut);

}  // namespace snug::detail
