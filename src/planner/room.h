#pragma once
// Room: the bytes that are free during each event of a step. Internal to planner.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace snug::plan {

/// A tree of least values over events. A node also has a sum that is subtracted from all values below the node.
class Room {
 public:
  Room(const std::vector<int64_t>& levels, int64_t budget);

  /// Takes `bytes` during the events first..last if so many are free during each event, and returns whether
  /// the bytes were taken. first <= last.
  bool take(int first, int last, int64_t bytes);

 private:
  int64_t least(size_t node, size_t begin, size_t end, size_t first, size_t last) const;
  void subtract(size_t node, size_t begin, size_t end, size_t first, size_t last, int64_t bytes);

  size_t leaves_ = 1;
  std::vector<int64_t> least_;  // below each node; the root is number 1, the children of n are 2 n and 2 n + 1
  std::vector<int64_t> taken_;  // from all values below each node, but not yet subtracted in the values
};

}  // namespace snug::plan
