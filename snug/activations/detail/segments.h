#pragma once
// Where to cut a chain of layers into segments that are recomputed one at a time.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace snug::detail {

/// What a chain of n layers keeps, in bytes.
struct ChainBytes {
  std::vector<int64_t> inputs;  ///< [n]: the input of each layer, kept until backward where a segment begins
  std::vector<std::vector<int64_t>>
      inside;  ///< [n][n]: [first][last], what these layers save besides the first one's input
};

/// The ends of segments, each one past its last layer, for the least peak: while the k-th segment is backward, the inputs of the segments up to
/// it are held, and all that it saves. Exact; of equal peaks the one whose last segment is longest, since that one need not be recomputed.
std::vector<size_t> least_peak_segments(const ChainBytes& bytes);

}  // namespace snug::detail
