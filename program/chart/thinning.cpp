#include "program/chart/thinning.h"

#include <algorithm>
#include <cmath>

namespace snug::chart {
namespace {

// Calls take(begin, end) for each run of points that share a column.
template <class Take>
void for_each_column(const std::vector<Point>& points, size_t columns, Take take) {
  if (points.empty() || columns == 0) {
    return;
  }
  const Columns grid(points.front().x, points.back().x, columns);
  size_t begin = 0;
  for (size_t i = 1; i <= points.size(); ++i) {
    if (i == points.size() || grid.of(points[i].x) != grid.of(points[begin].x)) {
      take(begin, i);
      begin = i;
    }
  }
}

void append_sorted_once(std::vector<size_t> indices, std::vector<size_t>& kept) {
  std::sort(indices.begin(), indices.end());
  indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
  kept.insert(kept.end(), indices.begin(), indices.end());
}

}  // namespace

size_t Columns::of(double x) const {
  const double place = width_ > 0 ? std::clamp((x - low_) / width_, 0.0, 1.0) : 0;
  return std::min(count_ - 1, static_cast<size_t>(place * static_cast<double>(count_)));
}

std::vector<size_t> thinned(const std::vector<Point>& points, size_t columns) {
  std::vector<size_t> kept;
  for_each_column(points, columns, [&](size_t begin, size_t end) {
    // Without a finite point: end - 1, which is kept anyway.
    size_t lowest = end - 1;
    size_t highest = end - 1;
    size_t broken = end - 1;
    bool any_finite = false;
    for (size_t i = end; i-- > begin;) {
      const double y = points[i].y;
      if (!std::isfinite(y)) {
        broken = i;
        continue;
      }
      lowest = !any_finite || y <= points[lowest].y ? i : lowest;
      highest = !any_finite || y >= points[highest].y ? i : highest;
      any_finite = true;
    }
    append_sorted_once({begin, lowest, highest, broken, end - 1}, kept);
  });
  return kept;
}

std::vector<size_t> thinned_to_highest(const std::vector<Point>& points, size_t columns) {
  std::vector<size_t> kept;
  for_each_column(points, columns, [&](size_t begin, size_t end) {
    size_t highest = begin;
    for (size_t i = begin; i < end; ++i) {
      highest = points[i].y > points[highest].y ? i : highest;
    }
    std::vector<size_t> indices{highest};
    if (begin == 0) {
      indices.push_back(0);
    }
    if (end == points.size()) {
      indices.push_back(end - 1);
    }
    append_sorted_once(std::move(indices), kept);
  });
  return kept;
}

}  // namespace snug::chart
