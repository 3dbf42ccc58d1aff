#pragma once
// How items are divided among ranks.

#include <cstdint>

namespace snug::detail {

/// The begin of rank `rank`'s share of `count` items, divided among `ranks` ranks. The share ends at the begin of the
/// next rank's share.
inline int64_t share_begin(int64_t count, int64_t rank, int64_t ranks) {
  return count / ranks * rank + count % ranks * rank / ranks;
}

}  // namespace snug::detail
