#include "src/activations/spill_extents.h"

#include <algorithm>
#include <iterator>

namespace snug::detail {

SpillExtents::Holes::const_iterator SpillExtents::hole_for(int64_t bytes) const {
  return std::find_if(holes_.begin(), holes_.end(), [&](const auto& hole) { return hole.second >= rounded_up(bytes); });
}

bool SpillExtents::has_room(int64_t bytes) const { return hole_for(bytes) != holes_.end() || bytes <= cap_ - end_; }

std::optional<int64_t> SpillExtents::take(int64_t bytes) {
  const int64_t size = rounded_up(bytes);
  const auto hole = hole_for(bytes);
  if (hole != holes_.end()) {
    const auto [offset, room] = *hole;
    holes_.erase(hole);
    if (room > size) {
      holes_.emplace(offset + size, room - size);
    }
    return offset;
  }
  if (bytes > cap_ - end_) {
    return std::nullopt;
  }
  const int64_t offset = end_;
  end_ += size;
  return offset;
}

void SpillExtents::give_back(int64_t offset, int64_t bytes) {
  int64_t size = rounded_up(bytes);
  const auto after = holes_.lower_bound(offset);
  if (after != holes_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      holes_.erase(before);
    }
  }
  if (after != holes_.end() && offset + size == after->first) {
    size += after->second;
    holes_.erase(after);
  }
  if (offset + size == end_) {
    end_ = offset;
  } else {
    holes_.emplace(offset, size);
  }
}

}  // namespace snug::detail
