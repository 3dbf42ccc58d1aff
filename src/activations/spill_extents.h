#pragma once
// SpillExtents: the parts of a file, or of a slab of memory, that are in use. It takes the lowest free place first, so
// that the file stays short.

#include <cstdint>
#include <map>
#include <optional>

namespace snug::detail {

class SpillExtents final {
 public:
  /// Places begin at its multiples.
  static constexpr int64_t kAlignment = 4096;

  /// Everything lies below `cap` bytes.
  explicit SpillExtents(int64_t cap) : cap_(cap) {}

  /// The offset of a place for `bytes` (>= 1), or nothing if there is no room.
  std::optional<int64_t> take(int64_t bytes);
  /// `offset` and `bytes` as they were taken.
  void give_back(int64_t offset, int64_t bytes);

  /// Behind the last place in use; 0 if none is.
  int64_t end() const { return end_; }

 private:
  int64_t cap_;
  int64_t end_ = 0;
  std::map<int64_t, int64_t> holes_;  // offset -> bytes; no two of them touch, and none touches the end
};

}  // namespace snug::detail
