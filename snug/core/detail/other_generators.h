#pragma once
// Random generators that are not torch's, as Python's `random`. Where they are made known, RngState takes them along.

#include <any>
#include <functional>

namespace snug::detail {

struct OtherGenerators {
  std::function<std::any()> capture;
  /// Must not throw.
  std::function<void(const std::any&)> restore;
};

/// Those of this process; at first none, that is, without functions. Set them before anything is captured.
OtherGenerators& other_generators();

}  // namespace snug::detail
