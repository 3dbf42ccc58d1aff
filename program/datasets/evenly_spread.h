#pragma once
// How items are chosen from a data set for an evaluation.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace snug::detail {

/// `count` of the indices 0 ... size - 1, spread evenly from the first to the last: the same indices at every call. All
/// indices, if `size` is not larger than `count`.
inline std::vector<int64_t> evenly_spread(int64_t count, int64_t size) {
  const int64_t last = size - 1;
  const int64_t number = std::min(count, size);
  const int64_t gaps = std::max<int64_t>(number - 1, 1);
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < number; ++i) {
    indices.push_back(last / gaps * i + last % gaps * i / gaps);  // last * i / gaps without overflow
  }
  return indices;
}

}  // namespace snug::detail
