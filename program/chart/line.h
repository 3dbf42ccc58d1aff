#pragma once
// line_chart: lines and points over the optimizer step, or over any axis.
//
//   page += line_chart({.title = "Loss", .series = {{.name = "training", .look = "training", .points = points}}});

#include <optional>
#include <string>
#include <vector>

#include "program/chart/axis.h"
#include "program/chart/figure.h"
#include "program/chart/thinning.h"

namespace snug::chart {

/// A `Line` of few points has dots too; of many points it has none. A `BareLine` never has.
enum class Drawn { Line, BareLine, Points, LineAndPoints };

struct Series {
  std::string name;  ///< in the legend and under the pointer; empty: in neither
  std::string look;
  std::vector<Point> points;  ///< x ascending for lines, which have a gap where y is not finite
  Drawn drawn = Drawn::Line;
  bool steps = false;                    ///< the value holds until the next point, instead of a straight line to it
  bool marks_gaps = true;                ///< what is not finite gets a mark at the lower edge
  std::vector<std::string> labels = {};  ///< of the points, as many as there are; or none
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
  std::string x_title = "optimizer step";
  std::optional<AxisOptions> x = {};  ///< unset: that of optimizer steps
  std::string y_title = {};
  AxisOptions y = {};
  Marks marks = {};
  bool wide = false;         ///< over the full width of the page
  std::string made = {};     ///< below: how the numbers came about
  std::string numbers = {};  ///< the file that holds them, to which a page has a link
};

/// A line is thinned to the points that can be seen. A label that would cover points or another label is left out; the
/// pointer still shows it.
std::string line_chart(const LineChart& chart, Medium medium = Medium::Page);

}  // namespace snug::chart
