#include "program/compare/exhibit_figures.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "program/chart/bars.h"
#include "program/chart/line.h"
#include "program/chart/tag.h"
#include "program/chart/text.h"
#include "program/compare/schedule_figure.h"

namespace snug::cli {
namespace {

constexpr size_t kLooks = 8;  // of series, in figure.css

std::string numbers_of(const Exhibit& exhibit) { return exhibit.file + ".csv"; }

chart::AxisOptions options_of(const PlotAxis& axis, bool is_x) {
  return {.quantity = axis.quantity,
          .from_zero = axis.from_zero,
          .tight = is_x && axis.log_base == 0 && !axis.from_zero,
          .log_base = axis.log_base,
          .about_ticks = is_x ? 8 : 5};
}

std::string plot_figure(const Exhibit& exhibit, const Plot& plot, chart::Medium medium) {
  chart::LineChart lines{.title = exhibit.title,
                         .caption = exhibit.caption,
                         .x_title = plot.x.title,
                         .x = options_of(plot.x, true),
                         .y_title = plot.y.title,
                         .y = options_of(plot.y, false),
                         .wide = plot.wide,
                         .made = exhibit.made,
                         .numbers = numbers_of(exhibit)};
  for (const Curve& curve : plot.curves) {
    chart::Series series{.name = curve.name,
                         .look = fmt::format("series-{}", lines.series.size() % kLooks),
                         .points = {},
                         .drawn = curve.drawn,
                         .labels = curve.labels};
    for (size_t i = 0; i < curve.x.size(); ++i) {
      series.points.push_back({curve.x[i], curve.y[i]});
    }
    lines.series.push_back(std::move(series));
  }
  return chart::line_chart(lines, medium);
}

// The report's own categories keep their colours.
std::string part_look(const std::vector<std::string>& parts, size_t index) {
  if (parts.size() == 1) {
    return "series-2";  // not the ink of the first series: a single part needs no distinction
  }
  constexpr std::array kOwnColours{"parameters", "gradients", "optimizer state", "activations", "workspace", "other"};
  std::string look = parts[index] == "masters" ? "other" : parts[index];
  if (std::find(kOwnColours.begin(), kOwnColours.end(), look) == kOwnColours.end()) {
    return fmt::format("series-{}", index);
  }
  std::replace(look.begin(), look.end(), ' ', '-');
  return look;
}

std::string bars_figure(const Exhibit& exhibit, const Bars& bars, chart::Medium medium) {
  chart::BarChart chart{.title = exhibit.title,
                        .caption = exhibit.caption,
                        .quantity = bars.quantity,
                        .bars = bars.bars,
                        .made = exhibit.made,
                        .numbers = numbers_of(exhibit)};
  for (size_t i = 0; i < bars.parts.size(); ++i) {
    chart.parts.push_back({bars.parts[i], part_look(bars.parts, i)});
  }
  return chart::bar_chart(chart, medium);
}

std::string table_figure(const Exhibit& exhibit, const Table& table) {
  using chart::escape_html;
  using chart::tag;
  std::string head, rows;
  for (const std::string& cell : table.header) {
    head += tag("th", {{"scope", "col"}}, escape_html(cell));
  }
  for (const auto& row : table.rows) {
    std::string cells;
    for (size_t i = 0; i < row.size(); ++i) {
      cells += i == 0 ? tag("th", {{"scope", "row"}}, escape_html(row[i])) : tag("td", {}, escape_html(row[i]));
    }
    rows += tag("tr", {}, cells) + "\n";
  }
  const std::string body = tag("thead", {}, tag("tr", {}, head)) + tag("tbody", {}, "\n" + rows);
  return chart::page_figure({.title = exhibit.title,
                             .caption = exhibit.caption,
                             .made = exhibit.made,
                             .numbers = numbers_of(exhibit),
                             .wide = true},
                            tag("div", {{"class", "scroll"}}, tag("table", {{"class", "numbers"}}, body)) + "\n");
}

}  // namespace

std::string exhibit_figure(const Exhibit& exhibit, chart::Medium medium) {
  if (const auto* plot = std::get_if<Plot>(&exhibit.content)) {
    return plot_figure(exhibit, *plot, medium);
  }
  if (const auto* bars = std::get_if<Bars>(&exhibit.content)) {
    return bars_figure(exhibit, *bars, medium);
  }
  if (const auto* schedule = std::get_if<Schedule>(&exhibit.content)) {
    return schedule_figure(exhibit, *schedule, medium);
  }
  return medium == chart::Medium::Image ? "" : table_figure(exhibit, std::get<Table>(exhibit.content));
}

}  // namespace snug::cli
