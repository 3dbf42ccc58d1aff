#pragma once
// Thinning: selects the visible points of a curve that has more points than the screen has pixels.

#include <cstddef>
#include <vector>

namespace snug::chart {

struct Point {
  double x = 0;
  double y = 0;
};

/// `count` columns of equal width over [low, high].
class Columns {
 public:
  Columns(double low, double high, size_t count) : low_(low), width_(high - low), count_(count) {}

  /// The column of x, in [0, count); an x outside belongs to the first or the last column.
  size_t of(double x) const;

 private:
  double low_;
  double width_;
  size_t count_;
};

/// The indices, ascending, of the points that are drawn when a line is `columns` pixels wide. Each column gives the
/// first, the lowest, the highest and the last point (M4: Jugel et al. 2014, "M4: a visualization-oriented time series
/// data aggregation", PVLDB 7(10)), and the first point that is not finite, if the column has such a point. x must
/// ascend.
std::vector<size_t> thinned(const std::vector<Point>& points, size_t columns);

/// The index of the highest point of each column, and the first and last index of all. x must ascend, y must be finite.
std::vector<size_t> thinned_to_highest(const std::vector<Point>& points, size_t columns);

}  // namespace snug::chart
