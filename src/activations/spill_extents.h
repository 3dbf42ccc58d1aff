#pragma once
// SpillExtents: the parts of a file, or of a slab of memory, that are in use. A new part takes the lowest free offset,
// so the file stays short.

#include <cstdint>
#include <map>
#include <optional>

namespace snug::detail {

class SpillExtents final {
 public:
  /// Parts begin at multiples of this number of bytes.
  static constexpr int64_t kAlignment = 4096;

  /// `bytes` with the room up to the next part.
  static constexpr int64_t rounded_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  /// All parts lie below `cap` bytes.
  explicit SpillExtents(int64_t cap) : cap_(cap) {}

  /// Returns the offset of a part for `bytes` (>= 1), or nothing if the room is too small.
  std::optional<int64_t> take(int64_t bytes);
  /// Whether take() would return a part for `bytes` (>= 1).
  bool has_room(int64_t bytes) const;
  /// Frees a part. `offset` and `bytes` must be those of take().
  void give_back(int64_t offset, int64_t bytes);

  /// The end of the last part in use; 0 if no part is in use.
  int64_t end() const { return end_; }

 private:
  using Holes = std::map<int64_t, int64_t>;

  Holes::const_iterator hole_for(int64_t bytes) const;

  int64_t cap_;
  int64_t end_ = 0;
  Holes holes_;  // offset -> bytes; no two holes touch, and no hole touches the end
};

}  // namespace snug::detail
