#include "program/chart/area.h"

#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "program/chart/figure.h"
#include "program/chart/tag.h"
#include "program/chart/text.h"
#include "program/chart/thinning.h"

namespace snug::chart {
namespace {

constexpr double kRoomForLabel = 0.065;  // of the height of the plot

// A stack of one step alone has no width, so the stack is drawn over the whole plot.
std::string area_path(const std::vector<double>& x, const std::vector<double>& tops, const std::vector<size_t>& shown,
                      const Frame& frame) {
  const double left = x.size() == 1 ? -std::numeric_limits<double>::max() : x.front();
  const double right = x.size() == 1 ? std::numeric_limits<double>::max() : x.back();
  std::string path = "M" + frame.at(left, 0) + "L" + frame.at(left, tops.front());
  for (const size_t i : shown) {
    path += "L" + frame.at(x[i], tops[i]);
  }
  return path + "L" + frame.at(right, tops.back()) + "L" + frame.at(right, 0) + "Z";
}

double drawn(double value) { return std::isfinite(value) && value > 0 ? value : 0; }

// The total at each x, and the upper edge of each layer at each x.
struct Stack {
  explicit Stack(const AreaChart& chart) : tops(chart.layers.size()) {
    for (size_t i = 0; i < chart.x.size(); ++i) {
      double top = 0;
      for (size_t layer = 0; layer < chart.layers.size(); ++layer) {
        top += drawn(chart.layers[layer].values[i]);
        tops[layer].push_back(top);
      }
      totals.push_back({chart.x[i], top});
    }
  }

  std::vector<Point> totals = {};
  std::vector<std::vector<double>> tops;
};

// The layers' names in the layers, at the right ends, if the layer has room: a name in the layer saves comparing
// colours.
std::vector<Label> labels_in(const AreaChart& chart, const Stack& stack, const Axis& y) {
  std::vector<Label> labels;
  for (size_t layer = 0; layer < chart.layers.size() && !chart.x.empty(); ++layer) {
    const double bottom = y.place(layer == 0 ? 0 : stack.tops[layer - 1].back());
    const double top = y.place(stack.tops[layer].back());
    if (top - bottom >= kRoomForLabel) {
      labels.push_back({.x = 1,
                        .y = (bottom + top) / 2,
                        .right = -10,
                        .before = 1,
                        .look = "inside " + chart.layers[layer].look,
                        .text = chart.layers[layer].name});
    }
  }
  return labels;
}

// A row for each column of pixels, for the last step in the column.
std::vector<Hover> hover_of(const AreaChart& chart, const Stack& stack, const Axis& x) {
  std::vector<Hover> rows;
  for (size_t i = 0; i < chart.x.size(); ++i) {
    if (i + 1 < chart.x.size() && hover_column(x, chart.x[i]) == hover_column(x, chart.x[i + 1])) {
      continue;
    }
    std::string lines = fmt::format("optimizer step {}\ntotal  {}", rounded(chart.x[i]),
                                    value_text(stack.totals[i].y, chart.y.quantity));
    for (size_t layer = chart.layers.size(); layer-- > 0;) {
      const Layer& one = chart.layers[layer];
      lines += fmt::format("\n{}  {}", one.name, value_text(drawn(one.values[i]), chart.y.quantity));
    }
    rows.push_back({.place = x.place(chart.x[i]), .lines = lines});
  }
  return rows;
}

}  // namespace

std::string area_chart(const AreaChart& chart, Medium medium) {
  const Stack stack(chart);
  Extent steps;
  Extent values{.low = 0, .high = 0};  // an area that does not stand on zero misleads
  for (const Point& total : stack.totals) {
    steps.add(total.x);
    values.add(total.y);
  }
  const Frame frame = make_frame(step_axis(steps), make_axis(values, chart.y), /*wide=*/true, medium);
  const std::vector<size_t> shown = thinned_to_highest(stack.totals, kPlotColumns);
  Heading heading{.title = chart.title, .caption = chart.caption, .wide = true};
  heading.description = chart.title + " over the optimizer step";
  Drawing drawing{.labels = labels_in(chart, stack, frame.y), .x_title = "optimizer step"};
  drawing.hover = hover_of(chart, stack, frame.x);
  for (size_t layer = chart.layers.size(); layer-- > 0;) {  // the highest layer first, lower layers over higher layers
    const Layer& one = chart.layers[layer];
    heading.keys.push_back({one.name, one.look, Shape::Area});
    if (!shown.empty()) {
      drawing.curves +=
          tag("path", {{"class", "area " + one.look}, {"d", area_path(chart.x, stack.tops[layer], shown, frame)}});
    }
  }
  return plot_figure(heading, drawing, frame, medium);
}

}  // namespace snug::chart
