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

/// A `Line` of few points has dots, too; a `Line` of many points has no dots. A `BareLine` never has dots.
enum class Drawn { Line, BareLine, Points, LineAndPoints };

struct Series {
  std::string name;  ///< in the legend and under the pointer; empty: not shown
  std::string look;
  std::vector<Point> points;  ///< x ascending for lines; a line has a gap where y is not finite
  Drawn drawn = Drawn::Line;
  bool steps = false;                    ///< the value holds until the next point, instead of a straight line to it
  bool marks_gaps = true;                ///< values that are not finite get a mark at the lower edge
  std::vector<std::string> labels = {};  ///< one label for each point, or no labels
};

/// Steps to point out, at the lower edge.
struct Marks {
  std::string name = {};
  std::string look = {};
  std::vector<double> x = {};
};

struct LineChart {
  std::string title;
  std::string caption = {};  ///< behind the title: content and unit
  std::vector<Series> series = {};
  std::string x_title = "optimizer step";
  std::optional<AxisOptions> x = {};  ///< unset: the axis of optimizer steps
  std::string y_title = {};
  AxisOptions y = {};
  Marks marks = {};
  bool wide = false;         ///< over the full width of the page
  std::string made = {};     ///< below: the origin of the numbers
  std::string numbers = {};  ///< the file with the numbers; a page links to the file
};

/// A line is thinned to the visible points. A label that covers points or another label is left out; the pointer still
/// shows the label.
std::string line_chart(const LineChart& chart, Medium medium = Medium::Page);

}  // namespace snug::chart
