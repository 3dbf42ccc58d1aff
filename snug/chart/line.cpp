#include "snug/chart/line.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include <fmt/format.h>

#include "snug/chart/figure.h"
#include "snug/chart/text.h"

namespace snug::chart {
namespace {

constexpr size_t kMostDots = 60;
constexpr size_t kFewPoints = 12;  // so few get dots in any case

// Short strokes at the lower edge; one per column, however many marks fall into it.
std::string marks_path(const std::vector<double>& marks, const Axis& x) {
  std::vector<bool> taken(kPlotColumns, false);
  std::string path;
  for (const double mark : marks) {
    const double place = x.place(mark);
    const auto column = static_cast<size_t>(place * (kPlotColumns - 1));
    if (!taken[column]) {
      taken[column] = true;
      path += fmt::format("M{:.1f} {}v-60", place * kPlotSide, kPlotSide);
    }
  }
  return path;
}

std::vector<double> not_finite(const std::vector<Series>& series) {
  std::vector<double> places;
  for (const Series& one : series) {
    for (const Point& point : one.points) {
      if (one.marks_gaps && !std::isfinite(point.y)) {
        places.push_back(point.x);
      }
    }
  }
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  return places;
}

// The last point at or before x; nullptr if the series begins later.
const Point* latest(const std::vector<Point>& points, double x) {
  const auto after =
      std::upper_bound(points.begin(), points.end(), x, [](double value, const Point& p) { return value < p.x; });
  return after == points.begin() ? nullptr : &*(after - 1);
}

std::vector<Hover> hover_of(const LineChart& chart) {
  std::vector<double> steps;
  for (const Series& series : chart.series) {
    if (series.points.size() > steps.size()) {
      steps.clear();
      std::transform(series.points.begin(), series.points.end(), std::back_inserter(steps),
                     [](const Point& point) { return point.x; });
    }
  }
  return hover_rows(steps, [&](size_t i) {
    std::string lines;
    for (const Series& series : chart.series) {
      const Point* point = latest(series.points, steps[i]);
      if (point != nullptr && !series.name.empty()) {
        lines += fmt::format("\n{}  {}", series.name, value_text(point->y, chart.y.quantity));
      }
    }
    return lines;
  });
}

// Draws the marks and their key; returns what is to be said of them.
std::string add_marks(Figure& figure, const Marks& marks, const Axis& x) {
  if (marks.x.empty()) {
    return "";
  }
  const std::string text = fmt::format("{} ({})", marks.name, grouped(static_cast<int64_t>(marks.x.size())));
  figure.legend += legend_key(text, marks.look, Shape::Mark);
  figure.curves += fmt::format("<path class=\"marks {}\" d=\"{}\"/>", marks.look, marks_path(marks.x, x));
  return "; " + text;
}

void add_line(Figure& figure, const Series& series, const Frame& frame, Quantity quantity) {
  figure.curves +=
      fmt::format("<path class=\"line {}\" d=\"{}\"/>", series.look, line_path(series.points, series.steps, frame));
  if (series.points.size() <= (series.dots ? kMostDots : kFewPoints)) {
    figure.curves += fmt::format("<path class=\"dots {}\" d=\"{}\"/>", series.look, dots_path(series.points, frame));
  }
  if (series.name.empty() || series.points.empty()) {
    return;
  }
  figure.legend += legend_key(series.name, series.look, Shape::Line);
  figure.description += fmt::format("; {} from {} to {}", series.name, value_text(series.points.front().y, quantity),
                                    value_text(series.points.back().y, quantity));
}

}  // namespace

std::string line_path(const std::vector<Point>& points, bool steps, const Frame& frame) {
  std::string path;
  bool drawing = false;
  double last_y = 0;
  std::vector<size_t> drawn(points.size());
  std::iota(drawn.begin(), drawn.end(), size_t{0});
  for (const size_t i : points.size() > kPlotColumns ? thinned(points, kPlotColumns) : drawn) {
    const auto [x, y] = points[i];
    if (!std::isfinite(y)) {
      drawing = false;
      continue;
    }
    if (drawing && steps) {
      path += "L" + frame.at(x, last_y);
    }
    path += drawing ? "L" + frame.at(x, y) : "M" + frame.at(x, y) + "h0";
    drawing = true;
    last_y = y;
  }
  return path;
}

std::string line_chart(const LineChart& chart) {
  Extent steps;
  Extent values;
  for (const Series& series : chart.series) {
    for (const Point& point : series.points) {
      steps.add(point.x);
      values.add(point.y);
    }
  }
  const Frame frame{.x = step_axis(steps), .y = make_axis(values, chart.y)};
  Figure figure{.title = chart.title, .caption = chart.caption, .hover = hover_of(chart), .wide = chart.wide};
  figure.description = chart.title + " over the optimizer step";
  for (const Series& series : chart.series) {
    add_line(figure, series, frame, chart.y.quantity);
  }
  const Marks broken{.name = "NaN or infinite", .look = "broken", .x = not_finite(chart.series)};
  figure.description += add_marks(figure, chart.marks, frame.x);
  figure.description += add_marks(figure, broken, frame.x);
  return figure_html(figure, frame);
}

}  // namespace snug::chart
