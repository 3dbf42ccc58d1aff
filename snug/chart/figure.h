#pragma once
// What all charts share: the frame with its axes, ticks, grid and legend, and the texts that the pointer brings up.
// line_chart and area_chart draw the curves.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "snug/chart/axis.h"
#include "snug/chart/thinning.h"

namespace snug::chart {

/// Curves are drawn in a square of this side, with y downwards, which the page stretches over the plot.
inline constexpr double kPlotSide = 1000;

/// About the width of a plot in pixels: what is finer than that is thinned.
inline constexpr size_t kPlotColumns = 500;

struct Frame {
  Axis x;
  Axis y;

  /// "123.4 567.8": where a point with finite coordinates lies in the plot.
  std::string at(double x_value, double y_value) const;
};

/// The axis of optimizer steps.
Axis step_axis(const Extent& steps);

enum class Shape { Line, Area, Mark, Dot };

/// One key of the legend; `text` is escaped.
std::string legend_key(std::string_view text, std::string_view look, Shape shape);

/// "M1 2h0M3 4h0": lines of length zero, whose ends are dots.
std::string dots_path(const std::vector<Point>& points, const Frame& frame);

/// `lines`, one below the other, are shown while the pointer is nearest to `step`.
struct Hover {
  double step = 0;
  std::string lines;
};

/// One row per column of pixels, for the last of the (ascending) steps in it; `lines_at(i)` tells what to say of
/// steps[i], each line with a line feed before it.
std::vector<Hover> hover_rows(const std::vector<double>& steps, const std::function<std::string(size_t)>& lines_at);

struct Figure {
  std::string title;
  std::string caption = {};  ///< escaped here, as the title and the description
  std::string legend = {};   ///< HTML
  std::string curves = {};   ///< SVG
  std::string labels = {};   ///< HTML over the curves
  std::string description = {};
  std::vector<Hover> hover = {};
  bool wide = false;
  std::string x_title = "optimizer step";
  std::string y_title = {};
  std::string foot = {};  ///< HTML below the plot
};

std::string figure_html(const Figure& figure, const Frame& frame);

/// A number as the pointer shows it: "1.50 GiB", "12.3 k", "0.01234".
std::string value_text(double value, Quantity quantity);

}  // namespace snug::chart
