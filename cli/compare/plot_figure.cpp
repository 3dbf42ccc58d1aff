// Curves and points over any axis. Curves differ in colour, in dashes and in the shape of their points, so that no one needs to see colours;
// points may carry labels, which are put where they cover neither points nor each other.

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "cli/compare/exhibit_figures.h"
#include "snug/chart/figure.h"
#include "snug/chart/line.h"
#include "snug/chart/text.h"

namespace snug::cli {
namespace {

constexpr size_t kLooks = 8;          // in page_style.cpp
constexpr size_t kMostLineDots = 40;  // of a line with points

std::string look_of(size_t curve) { return fmt::format("series-{}", curve % kLooks); }

std::vector<chart::Point> points_of(const Curve& curve) {
  std::vector<chart::Point> points;
  for (size_t i = 0; i < curve.x.size(); ++i) {
    points.push_back({curve.x[i], curve.y[i]});
  }
  return points;
}

// A rectangle in pixels of a plot of about the size that it has on a wide screen.
struct Box {
  double left, bottom, right, top;

  bool meets(const Box& other) const {
    return left < other.right && other.left < right && bottom < other.top && other.bottom < top;
  }
};

// Places labels one after the other, each at the first of a few places around its point that is free; a label without a free place is left
// out: the pointer still shows it.
class Labels {
 public:
  Labels(const chart::Frame& frame, bool is_wide)
      : frame_(frame), width_(is_wide ? 990 : 430), height_(is_wide ? 300 : 190) {}

  void keep_free(const chart::Point& point) {
    const auto [x, y] = pixels(point);
    taken_.push_back({x - 5, y - 5, x + 5, y + 5});
  }

  std::string add(const chart::Point& point, const std::string& text, const std::string& look) {
    const auto [x, y] = pixels(point);
    const double length = 6.4 * static_cast<double>(text.size());
    struct Place {
      double dx, dy, from;  // `from`: which share of the text lies left of its anchor
    };
    constexpr std::array<Place, 8> kPlaces{
        {{9, 0, 0}, {-9, 0, 1}, {0, 13, 0.5}, {0, -13, 0.5}, {7, 12, 0}, {7, -12, 0}, {-7, 12, 1}, {-7, -12, 1}}};
    for (const auto& [dx, dy, from] : kPlaces) {
      const double left = x + dx - from * length;
      const Box box{left, y + dy - 7, left + length, y + dy + 7};
      const bool fits = box.left > 0 && box.right < width_ + 20 && box.bottom > 0 && box.top < height_ + 10;
      if (fits && std::none_of(taken_.begin(), taken_.end(), [&](const Box& other) { return box.meets(other); })) {
        taken_.push_back(box);
        return fmt::format(
            "<span class=\"tag {}\" style=\"left:{:.2f}%;bottom:{:.2f}%;transform:translate({:.0f}%,50%) "
            "translate({:.0f}px,{:.0f}px)\" aria-hidden=\"true\">{}</span>",
            look, frame_.x.place(point.x) * 100, frame_.y.place(point.y) * 100, 100 * (0 - from), dx, 0 - dy,
            chart::escape_html(text));
      }
    }
    return "";
  }

 private:
  chart::Point pixels(const chart::Point& point) const {
    return {frame_.x.place(point.x) * width_, frame_.y.place(point.y) * height_};
  }

  const chart::Frame& frame_;
  double width_, height_;
  std::vector<Box> taken_;
};

std::string labels_of(const Plot& plot, const chart::Frame& frame) {
  Labels labels(frame, plot.wide);
  for (const Curve& curve : plot.curves) {
    if (curve.drawn != Drawn::Line || curve.x.size() < kMostLineDots) {
      for (const chart::Point& point : points_of(curve)) {
        labels.keep_free(point);
      }
    }
  }
  std::string html;
  for (size_t c = 0; c < plot.curves.size(); ++c) {
    const Curve& curve = plot.curves[c];
    for (size_t i = 0; i < curve.labels.size(); ++i) {
      if (!curve.labels[i].empty()) {
        html += labels.add({curve.x[i], curve.y[i]}, curve.labels[i], look_of(c));
      }
    }
  }
  return html;
}

chart::AxisOptions options_of(const PlotAxis& axis, bool is_x) {
  return {.quantity = axis.quantity,
          .from_zero = axis.from_zero,
          .tight = is_x && axis.log_base == 0 && !axis.from_zero,
          .log_base = axis.log_base,
          .about_ticks = is_x ? 8 : 5};
}

// A row for each x that some curve has a point at; those nearer than one can point share a row.
std::vector<chart::Hover> hover_of(const Plot& plot, const chart::Axis& x_axis) {
  constexpr double kRows = 150;
  std::map<int64_t, chart::Hover> rows;
  for (const Curve& curve : plot.curves) {
    for (size_t i = 0; i < curve.x.size(); ++i) {
      chart::Hover& row = rows[std::llround(x_axis.place(curve.x[i]) * kRows)];
      if (row.lines.empty()) {
        row.step = curve.x[i];
        row.lines = fmt::format("{} {}", plot.x.title, chart::value_text(curve.x[i], plot.x.quantity));
      }
      if (std::count(row.lines.begin(), row.lines.end(), '\n') < 12) {
        const std::string label = curve.labels.empty() || curve.labels[i].empty() ? "" : ", " + curve.labels[i];
        row.lines += fmt::format("\n{}{}  {}", curve.name, label, chart::value_text(curve.y[i], plot.y.quantity));
      }
    }
  }
  std::vector<chart::Hover> result;
  for (auto& [column, row] : rows) {
    result.push_back(std::move(row));
  }
  return result;
}

void add_curve(chart::Figure& figure, const Curve& curve, const std::string& look, const chart::Frame& frame) {
  const std::vector<chart::Point> points = points_of(curve);
  const bool has_line = curve.drawn != Drawn::Points;
  if (has_line) {
    figure.curves +=
        fmt::format("<path class=\"line {}\" d=\"{}\"/>", look, chart::line_path(points, /*steps=*/false, frame));
  }
  if (!has_line || (curve.drawn == Drawn::LineAndPoints && points.size() <= kMostLineDots)) {
    const std::string dots = chart::dots_path(points, frame);
    const char* size = points.size() > kMostLineDots ? " small" : "";
    figure.curves += fmt::format("<path class=\"dots {0}{1}\" d=\"{2}\"/><path class=\"holes {0}{1}\" d=\"{2}\"/>",
                                 look, size, dots);
  }
  figure.legend += chart::legend_key(curve.name, look, has_line ? chart::Shape::Line : chart::Shape::Dot);
}

}  // namespace

std::string plot_figure(const Exhibit& exhibit, const Plot& plot, Medium medium) {
  chart::Extent xs, ys;
  for (const Curve& curve : plot.curves) {
    for (size_t i = 0; i < curve.x.size(); ++i) {
      xs.add(curve.x[i]);
      ys.add(curve.y[i]);
    }
  }
  const chart::Frame frame{.x = chart::make_axis(xs, options_of(plot.x, true)),
                           .y = chart::make_axis(ys, options_of(plot.y, false))};
  chart::Figure figure{.title = exhibit.title, .caption = exhibit.caption, .wide = plot.wide};
  figure.description = fmt::format("{}: {} over {}", exhibit.title, plot.y.title, plot.x.title);
  figure.x_title = frame.x.unit.empty() ? plot.x.title : fmt::format("{} ({})", plot.x.title, frame.x.unit);
  figure.y_title = plot.y.title;
  for (size_t c = 0; c < plot.curves.size(); ++c) {
    add_curve(figure, plot.curves[c], look_of(c), frame);
  }
  figure.labels = labels_of(plot, frame);
  if (medium == Medium::Page) {
    figure.hover = hover_of(plot, frame.x);
  }
  figure.foot = figure_foot(exhibit, medium);
  return chart::figure_html(figure, frame);
}

}  // namespace snug::cli
