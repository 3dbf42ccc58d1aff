#pragma once
// line_chart: lines over the optimizer step, as an HTML figure around an inline SVG. The SVG holds only the curves
// and stretches with the page; ticks and legends are HTML beside it, so that text keeps its size on a phone and on a
// wide screen.
//
//   page += line_chart({.title = "Loss", .series = {{.name = "training", .look = "training", .points = points}}});
//
// `look` names colour and dashes in snug/chart/style.cpp. All other text is escaped here.

#include <string>
#include <vector>

#include "snug/chart/axis.h"
#include "snug/chart/figure.h"
#include "snug/chart/thinning.h"

namespace snug::chart {

struct Series {
  std::string name;  ///< in the legend and under the pointer; empty: in neither
  std::string look;
  std::vector<Point> points;  ///< x ascending; where y is not finite the line has a gap
  bool steps = false;         ///< the value holds until the next point, instead of a straight line to it
  bool dots = false;          ///< each point gets a dot, if they are few enough to be told apart
  bool marks_gaps = true;     ///< what is not finite gets a mark at the lower edge
};

/// Steps to point out, at the lower edge.
struct Marks {
  std::string name = {};
  std::string look = {};
  std::vector<double> x = {};
};

struct LineChart {
  std::string title;
  std::string caption = {};  ///< behind the title: what is drawn, in which unit
  std::vector<Series> series = {};
  AxisOptions y = {};
  Marks marks = {};
  bool wide = false;  ///< over the full width of the page
};

/// One "M" per unbroken stretch of finite values, thinned if there are many. A stretch of one point is a line of length zero, which its round ends show as a
/// dot. `steps`: the value holds until the next point.
std::string line_path(const std::vector<Point>& points, bool steps, const Frame& frame);

/// A chart of lines over the optimizer step, thinned to what can be seen. Without points it says that there are none.
std::string line_chart(const LineChart& chart);

}  // namespace snug::chart
