#include "snug/chart/figure.h"

#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/chart/text.h"
#include "snug/chart/thinning.h"

namespace snug::chart {
namespace {

constexpr size_t kHoverColumns = 150;  // as exact as one can point

std::string grid_path(const Axis& y) {
  std::string path;
  for (const Tick& tick : y.ticks) {
    path += fmt::format("M0 {:.1f}H{}", (1 - tick.place) * kPlotSide, kPlotSide);
  }
  return path;
}

std::string tick_labels(const Axis& axis, std::string_view side, std::string_view from, std::string_view title) {
  std::string html =
      fmt::format("<div class=\"{}-ticks\" data-title=\"{}\" aria-hidden=\"true\">", side, escape_html(title));
  for (const Tick& tick : axis.ticks) {
    html += fmt::format("<span style=\"{}:{:.2f}%\">{}</span>", from, tick.place * 100, escape_html(tick.label));
  }
  return html + "</div>";
}

// As an attribute, for the script.
std::string hover_json(const std::vector<Hover>& hover, const Axis& x) {
  nlohmann::json places = nlohmann::json::array();
  nlohmann::json texts = nlohmann::json::array();
  for (const Hover& row : hover) {
    places.push_back(std::round(x.place(row.step) * 1e4) / 1e4);
    texts.push_back(row.lines);
  }
  const nlohmann::json data{{"places", places}, {"texts", texts}};
  return escape_html(data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

std::string step_text(double step) {
  return std::abs(step) < 9e18 ? "step " + grouped(std::llround(step)) : "step " + rounded(step);
}

}  // namespace

std::string Frame::at(double x_value, double y_value) const {
  return fmt::format("{:.1f} {:.1f}", x.place(x_value) * kPlotSide, (1 - y.place(y_value)) * kPlotSide);
}

Axis step_axis(const Extent& steps) {
  Extent shown = steps;
  if (!steps.empty() && steps.low > 0 && steps.low <= 0.05 * steps.high) {
    shown.add(0);
  }
  return make_axis(shown, {.quantity = Quantity::Count, .tight = true, .about_ticks = 6});
}

std::string legend_key(std::string_view text, std::string_view look, Shape shape) {
  const char* drawing = shape == Shape::Line   ? "<path class=\"line\" d=\"M2 5h22\"/>"
                        : shape == Shape::Area ? "<path class=\"area\" d=\"M6 0h14v10h-14z\"/>"
                        : shape == Shape::Mark
                            ? "<path class=\"marks\" d=\"M13 1v8\"/>"
                            : "<path class=\"dots\" d=\"M13 5h0\"/><path class=\"holes\" d=\"M13 5h0\"/>";
  return fmt::format(
      "<span class=\"key\"><svg class=\"{}\" viewBox=\"0 0 26 10\" width=\"26\" height=\"10\" "
      "aria-hidden=\"true\">{}</svg>{}</span>",
      look, drawing, escape_html(text));
}

std::string dots_path(const std::vector<Point>& points, const Frame& frame) {
  std::string path;
  for (const Point& point : points) {
    if (std::isfinite(point.y)) {
      path += "M" + frame.at(point.x, point.y) + "h0";
    }
  }
  return path;
}

std::vector<Hover> hover_rows(const std::vector<double>& steps, const std::function<std::string(size_t)>& lines_at) {
  std::vector<Hover> rows;
  if (steps.empty()) {
    return rows;
  }
  const Columns columns(steps.front(), steps.back(), kHoverColumns);
  for (size_t i = 0; i < steps.size(); ++i) {
    if (i + 1 == steps.size() || columns.of(steps[i]) != columns.of(steps[i + 1])) {
      rows.push_back({steps[i], step_text(steps[i]) + lines_at(i)});
    }
  }
  return rows;
}

std::string figure_html(const Figure& figure, const Frame& frame) {
  std::string html = fmt::format(
      "<figure class=\"chart{}\">\n<figcaption><h3>{}</h3><span class=\"caption\">{}</span>"
      "<span class=\"legend\">{}</span></figcaption>\n",
      figure.wide ? " wide" : "", escape_html(figure.title), escape_html(figure.caption), figure.legend);
  const bool is_pointed_at = !figure.hover.empty();
  html += fmt::format("<div class=\"plot\"{}>\n{}\n",
                      is_pointed_at ? fmt::format(" data-hover=\"{}\"", hover_json(figure.hover, frame.x)) : "",
                      tick_labels(frame.y, "y", "bottom", ""));
  if (!figure.y_title.empty()) {
    html += fmt::format("<div class=\"y-title\">{}{}</div>\n", escape_html(figure.y_title),
                        frame.y.unit.empty() ? "" : " (" + escape_html(frame.y.unit) + ")");
  } else if (!frame.y.unit.empty()) {
    html += fmt::format("<div class=\"unit\">{}</div>\n", escape_html(frame.y.unit));
  }
  html += fmt::format(
      "<svg viewBox=\"0 0 {0} {0}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{1}\">"
      "<path class=\"grid\" d=\"{2}\"/>{3}</svg>\n{4}{5}\n",
      kPlotSide, escape_html(figure.description), grid_path(frame.y), figure.curves, figure.labels,
      tick_labels(frame.x, "x", "left", figure.x_title));
  html += is_pointed_at ? "<div class=\"cursor\" hidden><div class=\"tip\"></div></div>\n" : "";
  return html + "</div>\n" + figure.foot + "</figure>\n";
}

std::string value_text(double value, Quantity quantity) {
  switch (quantity) {
    case Quantity::Bytes:
      return std::abs(value) < 9e18 ? byte_text(std::llround(value)) : rounded(value);
    case Quantity::Count:
      return prefixed(value);
    case Quantity::Number:
      break;
  }
  return rounded(value);
}

}  // namespace snug::chart
