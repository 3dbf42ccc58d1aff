#pragma once
// A check that holds in every build, also with NDEBUG.

#include <cstdlib>

namespace snug::fuzz {

/// Ends the process where what was read and written again differs.
inline void require_same(bool same) {
  if (!same) {
    std::abort();
  }
}

}  // namespace snug::fuzz
