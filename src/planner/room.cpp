#include "src/planner/room.h"

#include <algorithm>
#include <limits>

#include "src/planner/at.h"

namespace snug::plan {

Room::Room(const std::vector<int64_t>& levels, int64_t budget) {
  while (leaves_ < levels.size()) {
    leaves_ *= 2;
  }
  least_.assign(2 * leaves_, std::numeric_limits<int64_t>::max() / 2);
  taken_.assign(2 * leaves_, 0);
  for (size_t e = 0; e < levels.size(); ++e) {
    least_[leaves_ + e] = budget - levels[e];
  }
  for (size_t node = leaves_; --node > 0;) {
    least_[node] = std::min(least_[2 * node], least_[2 * node + 1]);
  }
}

bool Room::take(int first, int last, int64_t bytes) {
  if (least(1, 0, leaves_, at(first), at(last) + 1) < bytes) {
    return false;
  }
  subtract(1, 0, leaves_, at(first), at(last) + 1, bytes);
  return true;
}

int64_t Room::least(size_t node, size_t begin, size_t end, size_t first, size_t last) const {
  if (first <= begin && end <= last) {
    return least_[node];
  }
  if (last <= begin || end <= first) {
    return std::numeric_limits<int64_t>::max() / 2;
  }
  const size_t middle = (begin + end) / 2;
  return std::min(least(2 * node, begin, middle, first, last), least(2 * node + 1, middle, end, first, last)) -
         taken_[node];
}

void Room::subtract(size_t node, size_t begin, size_t end, size_t first, size_t last, int64_t bytes) {
  if (last <= begin || end <= first) {
    return;
  }
  if (first <= begin && end <= last) {
    least_[node] -= bytes;
    taken_[node] += bytes;
    return;
  }
  const size_t middle = (begin + end) / 2;
  subtract(2 * node, begin, middle, first, last, bytes);
  subtract(2 * node + 1, middle, end, first, last, bytes);
  least_[node] = std::min(least_[2 * node], least_[2 * node + 1]) - taken_[node];
}

}  // namespace snug::plan
