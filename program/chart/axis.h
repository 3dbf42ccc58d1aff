#pragma once
// Axis: from values to positions on a chart, with ticks at round numbers.
//
//   const Axis y = make_axis({.low = 1.38, .high = 5.61}, {.about_ticks = 5});     // ticks 1, 2, 3, 4, 5, 6
//   y.place(2.5);                                                                 // 0.3 of the way up

#include <string>
#include <vector>

#include "program/chart/quantity.h"

namespace snug::chart {

struct Tick {
  double place;       ///< in [0, 1], the result of Axis::place
  std::string label;  ///< plain text
};

struct Axis {
  double low = 0;  ///< the value at place 0; on a logarithmic axis, the value's logarithm
  double high = 1;
  double log_base = 0;  ///< 0: linear
  std::string unit;     ///< the unit of the labels: "", "×10⁻⁴", "GiB"
  std::vector<Tick> ticks;

  /// The position of a finite value: 0 at the low end, 1 at the high end, never outside.
  double place(double value) const;
};

/// The finite values that an axis must show; low > high: no values.
struct Extent {
  double low = 1;
  double high = 0;

  /// Takes in a value; a value that is not finite changes nothing.
  void add(double value);
  bool empty() const { return low > high; }
};

struct AxisOptions {
  Quantity quantity = Quantity::Number;
  bool from_zero = false;  ///< show zero, too
  bool tight = false;      ///< end at the extent, not at the next tick
  double log_base = 0;     ///< 2 or 10: logarithmic, if all values are positive
  int about_ticks = 5;
};

Axis make_axis(Extent extent, const AxisOptions& options);

}  // namespace snug::chart
