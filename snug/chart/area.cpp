#include "snug/chart/area.h"

#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "snug/chart/figure.h"
#include "snug/chart/text.h"
#include "snug/chart/thinning.h"

namespace snug::chart {
namespace {

constexpr double kRoomForLabel = 0.065;  // of the height of the plot

// A stack of one step alone would have no width: it is drawn over the whole plot.
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

// The layer's name in the layer, at its right end, if there is room: nobody needs to compare colours then.
std::string inside_label(const Layer& layer, double bottom, double top) {
  if (top - bottom < kRoomForLabel) {
    return "";
  }
  return fmt::format("<span class=\"inside {}\" style=\"bottom:{:.2f}%\" aria-hidden=\"true\">{}</span>", layer.look,
                     (bottom + top) * 50, escape_html(layer.name));
}

}  // namespace

std::string area_chart(const AreaChart& chart) {
  Extent steps;
  Extent values{.low = 0, .high = 0};  // areas that did not stand on zero would lie
  std::vector<Point> totals;
  std::vector<std::vector<double>> tops(chart.layers.size());  // per layer, its upper edge
  for (size_t i = 0; i < chart.x.size(); ++i) {
    double top = 0;
    for (size_t layer = 0; layer < chart.layers.size(); ++layer) {
      top += drawn(chart.layers[layer].values[i]);
      tops[layer].push_back(top);
    }
    totals.push_back({chart.x[i], top});
    steps.add(chart.x[i]);
    values.add(top);
  }
  const Frame frame{.x = step_axis(steps), .y = make_axis(values, chart.y)};
  const std::vector<size_t> shown = thinned_to_highest(totals, kPlotColumns);
  Figure figure{.title = chart.title,
                .caption = chart.caption,
                .description = chart.title + " over the optimizer step",
                .wide = true};
  for (size_t layer = chart.layers.size(); layer-- > 0;) {  // the highest first, the lower ones over it
    const auto& [name, look, amounts] = chart.layers[layer];
    figure.legend += legend_key(name, look, Shape::Area);
    if (!shown.empty()) {
      figure.curves +=
          fmt::format("<path class=\"area {}\" d=\"{}\"/>", look, area_path(chart.x, tops[layer], shown, frame));
      const double bottom = layer == 0 ? 0 : tops[layer - 1].back();
      figure.labels += inside_label(chart.layers[layer], frame.y.place(bottom), frame.y.place(tops[layer].back()));
    }
  }
  figure.hover = hover_rows(chart.x, [&](size_t i) {
    std::string lines = fmt::format("\ntotal  {}", value_text(totals[i].y, chart.y.quantity));
    for (size_t layer = chart.layers.size(); layer-- > 0;) {
      const Layer& one = chart.layers[layer];
      lines += fmt::format("\n{}  {}", one.name, value_text(drawn(one.values[i]), chart.y.quantity));
    }
    return lines;
  });
  return figure_html(figure, frame);
}

}  // namespace snug::chart
