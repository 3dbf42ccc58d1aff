#include "program/chart/line.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include <fmt/format.h>

#include "program/chart/labels.h"
#include "program/chart/tag.h"
#include "program/chart/text.h"

namespace snug::chart {
namespace {

constexpr size_t kMostDots = 60;
constexpr size_t kFewPoints = 12;  // up to so many points always get dots
constexpr int kHoverLines = 12;

bool has_line(const Series& series) { return series.drawn != Drawn::Points; }

bool has_dots(const Series& series) {
  if (series.drawn == Drawn::BareLine) {
    return false;
  }
  return !has_line(series) || series.points.size() <= (series.drawn == Drawn::Line ? kFewPoints : kMostDots);
}

// Short strokes at the lower edge; one per column, for any number of marks in the column.
std::string marks_path(const std::vector<double>& marks, const Frame& frame) {
  std::vector<bool> taken(kPlotColumns, false);
  std::string path;
  for (const double mark : marks) {
    const double place = frame.x.place(mark);
    const auto column = static_cast<size_t>(place * (kPlotColumns - 1));
    if (!taken[column]) {
      taken[column] = true;
      path += fmt::format("M{:.1f} {:.0f}v-{:.0f}", place * frame.width, frame.height, 0.06 * frame.height);
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

// One "M" per unbroken stretch of finite values. A stretch of one point is a line of length zero, and the line's round
// ends show as a dot.
std::string line_path(const Series& series, const Frame& frame) {
  std::vector<size_t> shown(series.points.size());
  std::iota(shown.begin(), shown.end(), size_t{0});
  if (shown.size() > kPlotColumns) {
    shown = thinned(series.points, kPlotColumns);
  }
  std::string path;
  bool drawing = false;
  double last_y = 0;
  for (const size_t i : shown) {
    const auto [x, y] = series.points[i];
    if (!std::isfinite(y)) {
      drawing = false;
      continue;
    }
    if (drawing && series.steps) {
      path += "L" + frame.at(x, last_y);
    }
    path += drawing ? "L" + frame.at(x, y) : "M" + frame.at(x, y) + "h0";
    drawing = true;
    last_y = y;
  }
  return path;
}

// Lines of length zero, whose ends are dots.
std::string dots_path(const std::vector<Point>& points, const Frame& frame) {
  std::string path;
  for (const Point& point : points) {
    if (std::isfinite(point.y)) {
      path += "M" + frame.at(point.x, point.y) + "h0";
    }
  }
  return path;
}

// A row for each column of pixels with points: for a line the last point in the column, for single points all points.
std::vector<Hover> hover_of(const LineChart& chart, const Axis& x_axis, Quantity x_quantity) {
  std::map<int64_t, Hover> rows;
  for (const Series& series : chart.series) {
    const size_t count = series.name.empty() ? 0 : series.points.size();
    for (size_t i = 0; i < count; ++i) {
      const Point& point = series.points[i];
      if (has_line(series) && i + 1 < count &&
          hover_column(x_axis, series.points[i + 1].x) == hover_column(x_axis, point.x)) {
        continue;
      }
      Hover& row = rows[hover_column(x_axis, point.x)];
      if (row.lines.empty()) {
        const std::string x = x_quantity == Quantity::Count ? rounded(point.x) : value_text(point.x, x_quantity);
        row = {.place = x_axis.place(point.x), .lines = chart.x_title + " " + x};
      }
      if (std::count(row.lines.begin(), row.lines.end(), '\n') < kHoverLines) {
        const std::string label = series.labels.empty() || series.labels[i].empty() ? "" : ", " + series.labels[i];
        row.lines += fmt::format("\n{}{}  {}", series.name, label, value_text(point.y, chart.y.quantity));
      }
    }
  }
  std::vector<Hover> result;
  for (auto& [column, row] : rows) {
    result.push_back(std::move(row));
  }
  return result;
}

std::vector<Label> labels_of(const LineChart& chart, const Frame& frame) {
  LabelPlacer placer(plot_size(chart.wide));
  for (const Series& series : chart.series) {
    for (const Point& point : has_dots(series) ? series.points : std::vector<Point>()) {
      placer.keep_free(frame.x.place(point.x), frame.y.place(point.y));
    }
  }
  std::vector<Label> labels;
  for (const Series& series : chart.series) {
    for (size_t i = 0; i < series.labels.size(); ++i) {
      const auto [x, y] = series.points[i];
      if (series.labels[i].empty() || !std::isfinite(y)) {
        continue;
      }
      if (auto label = placer.place(frame.x.place(x), frame.y.place(y), series.labels[i], series.look)) {
        labels.push_back(std::move(*label));
      }
    }
  }
  return labels;
}

// Draws the marks and their key; returns their description.
std::string add_marks(Heading& heading, Drawing& drawing, const Marks& marks, const Frame& frame) {
  if (marks.x.empty()) {
    return "";
  }
  const std::string text = fmt::format("{} ({})", marks.name, grouped(static_cast<int64_t>(marks.x.size())));
  heading.keys.push_back({.text = text, .look = marks.look, .shape = Shape::Mark});
  drawing.curves += tag("path", {{"class", "marks " + marks.look}, {"d", marks_path(marks.x, frame)}});
  return "; " + text;
}

std::string curve_of(const Series& series, const Frame& frame) {
  std::string svg;
  if (has_line(series)) {
    svg += tag("path", {{"class", "line " + series.look}, {"d", line_path(series, frame)}});
  }
  if (has_dots(series)) {
    const std::string look = series.look + (series.points.size() > kMostDots ? " small" : "");
    const std::string dots = dots_path(series.points, frame);
    svg +=
        tag("path", {{"class", "dots " + look}, {"d", dots}}) + tag("path", {{"class", "holes " + look}, {"d", dots}});
  }
  return svg;
}

Frame frame_of(const LineChart& chart, Medium medium) {
  Extent xs;
  Extent ys;
  for (const Series& series : chart.series) {
    for (const Point& point : series.points) {
      xs.add(point.x);
      ys.add(point.y);
    }
  }
  return make_frame(chart.x ? make_axis(xs, *chart.x) : step_axis(xs), make_axis(ys, chart.y), chart.wide, medium);
}

}  // namespace

std::string line_chart(const LineChart& chart, Medium medium) {
  const Frame frame = frame_of(chart, medium);
  Heading heading{.title = chart.title, .caption = chart.caption, .made = chart.made, .numbers = chart.numbers};
  heading.wide = chart.wide;
  heading.description =
      fmt::format("{}{}{} over the {}", chart.title, chart.y_title.empty() ? "" : ": ", chart.y_title, chart.x_title);
  Drawing drawing{.labels = labels_of(chart, frame), .x_title = chart.x_title, .y_title = chart.y_title};
  drawing.hover = hover_of(chart, frame.x, chart.x ? chart.x->quantity : Quantity::Count);
  for (const Series& series : chart.series) {
    drawing.curves += curve_of(series, frame);
    if (!series.name.empty() && !series.points.empty()) {
      heading.keys.push_back({series.name, series.look, has_line(series) ? Shape::Line : Shape::Dot});
      heading.description +=
          fmt::format("; {} from {} to {}", series.name, value_text(series.points.front().y, chart.y.quantity),
                      value_text(series.points.back().y, chart.y.quantity));
    }
  }
  const Marks broken{.name = "NaN or infinite", .look = "broken", .x = not_finite(chart.series)};
  heading.description += add_marks(heading, drawing, chart.marks, frame);
  heading.description += add_marks(heading, drawing, broken, frame);
  return plot_figure(heading, drawing, frame, medium);
}

}  // namespace snug::chart
