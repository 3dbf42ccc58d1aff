#pragma once
// Figures: title and legend, a frame with axes, labels, and texts under the pointer. line_chart, area_chart and
// bar_chart draw the content. A figure has one of two media:
//   - A page. An SVG has only the curves and stretches with the page. Ticks, labels and legend are HTML beside the SVG,
//     so text keeps its size on a phone and on a wide screen.
//   - An image: a complete SVG of fixed size, with text inside.
//
// A look is the name of a class in figure.css: colour, dashes and the shape of points. All texts are escaped by these
// functions.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "program/chart/axis.h"
#include "program/chart/thinning.h"

namespace snug::chart {

enum class Medium { Page, Image };

enum class Shape { Line, Area, Mark, Dot };

/// One key of the legend.
struct Key {
  std::string text;
  std::string look;
  Shape shape = Shape::Line;
};

/// The texts around a figure.
struct Heading {
  std::string title;
  std::string caption = {};      ///< behind the title: content and unit
  std::vector<Key> keys = {};    ///< the legend
  std::string made = {};         ///< below: the origin of the numbers
  std::string numbers = {};      ///< the file with the numbers; a page links to the file
  std::string description = {};  ///< for readers who do not see the figure
  bool wide = false;             ///< over the full width of the page
};

/// The area of a plot, in the units of the plot's SVG, with y downwards.
struct Frame {
  Axis x;
  Axis y;
  double width;
  double height;

  /// "123.4 567.8": the position of a point with finite coordinates in the plot.
  std::string at(double x_value, double y_value) const;
};

/// Width and height of a plot in pixels: exact for an image, and about right for a page on a wide screen.
std::pair<double, double> plot_size(bool wide);

/// On a page the plot is a square of 1000 units, which the page stretches.
Frame make_frame(Axis x, Axis y, bool wide, Medium medium);

/// The axis of optimizer steps, which begins at zero if the first step is near zero.
Axis step_axis(Extent steps);

/// About the width of a plot in pixels: finer detail is thinned.
inline constexpr size_t kPlotColumns = 500;

/// Text beside a point in the plot.
struct Label {
  double x = 0;  ///< the point, each coordinate in [0, 1] from the lower left corner
  double y = 0;
  double right = 0;  ///< distance from the point, in pixels
  double up = 0;
  double before = 0;  ///< the share of the text left of the point: 0, 0.5 or 1
  std::string look = {};
  std::string text = {};
};

/// `lines`, one below the other, are shown while the pointer is nearest to `place`.
struct Hover {
  double place = 0;  ///< of the x axis, in [0, 1]
  std::string lines = {};
};

/// The columns of a plot are as narrow as a pointer can aim.
int64_t hover_column(const Axis& x, double value);

/// The contents of a plot.
struct Drawing {
  std::string curves = {};  ///< SVG
  std::vector<Label> labels = {};
  std::vector<Hover> hover = {};  ///< by ascending place; only for pages
  std::string x_title = {};
  std::string y_title = {};
};

/// A plot with its axes.
std::string plot_figure(const Heading& heading, const Drawing& drawing, const Frame& frame, Medium medium);

/// A figure of a page around any HTML.
std::string page_figure(const Heading& heading, std::string_view body);

/// An image of the given `width` and the necessary height: the heading around `body`, an SVG fragment of `height`.
std::string image_figure(const Heading& heading, std::string_view body, double width, double height);

/// An image without a heading: the SVG fragment `body`, with the figures' style.
std::string image(std::string_view title, std::string_view body, double width, double height);

/// SVG text; `look` may be "soft", "end", "middle" or several of them.
std::string svg_text(double x, double y, std::string_view look, std::string_view text);

/// An upper bound of the width of a text in pixels.
double text_width(std::string_view text);

/// A number in the form under the pointer: "1.50 GiB", "12.3 k", "0.01234".
std::string value_text(double value, Quantity quantity);

}  // namespace snug::chart
