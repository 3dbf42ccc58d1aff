#include "cli/compare/exhibit_figures.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "snug/chart/figure.h"
#include "snug/chart/text.h"

namespace snug::cli {
namespace {

// The report's own categories keep their colours.
std::string part_look(const std::vector<std::string>& parts, size_t index) {
  if (parts.size() == 1) {
    return "series-2";  // not the ink of the first series: there is nothing to tell it from
  }
  constexpr std::array kOwnColours{"parameters", "gradients", "optimizer state", "activations", "workspace", "other"};
  std::string look = parts[index] == "masters" ? "other" : parts[index];
  if (std::find(kOwnColours.begin(), kOwnColours.end(), look) == kOwnColours.end()) {
    return fmt::format("series-{}", index);
  }
  std::replace(look.begin(), look.end(), ' ', '-');
  return look;
}

double shown(double value) { return std::isfinite(value) && value > 0 ? value : 0; }

double sum_of(const Bar& bar) {
  double sum = 0;
  for (const double value : bar.values) {
    sum += shown(value);
  }
  return sum;
}

std::string bar_row(const Bars& bars, const Bar& bar, double largest) {
  std::string rects;
  std::string told;
  double left = 0;
  for (size_t i = 0; i < bar.values.size(); ++i) {
    const double width = shown(bar.values[i]) / largest * chart::kPlotSide;
    rects += fmt::format("<rect class=\"area {}\" x=\"{:.2f}\" width=\"{:.2f}\" height=\"10\"/>",
                         part_look(bars.parts, i), left, width);
    told += fmt::format("{}{} {}", i == 0 ? "" : ", ", bars.parts[i],
                        chart::value_text(shown(bar.values[i]), bars.quantity));
    left += width;
  }
  return fmt::format(
      "<tr title=\"{0}: {1}\"><th scope=\"row\">{0}</th><td class=\"cells\"><svg viewBox=\"0 0 {2} 10\" "
      "preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{1}\">{3}</svg></td><td>{4}</td><td "
      "class=\"note\">{5}</td></tr>\n",
      chart::escape_html(bar.name), chart::escape_html(told), chart::kPlotSide, rects,
      chart::value_text(sum_of(bar), bars.quantity), chart::escape_html(bar.note));
}

std::string open_figure(const Exhibit& exhibit, const std::string& legend) {
  return fmt::format(
      "<figure class=\"chart wide\">\n<figcaption><h3>{}</h3><span class=\"caption\">{}</span>{}</figcaption>\n",
      chart::escape_html(exhibit.title), chart::escape_html(exhibit.caption),
      legend.empty() ? "" : "<span class=\"legend\">" + legend + "</span>");
}

std::string bars_figure(const Exhibit& exhibit, const Bars& bars, Medium medium) {
  double largest = 0;
  for (const Bar& bar : bars.bars) {
    largest = std::max(largest, sum_of(bar));
  }
  std::string legend;
  for (size_t i = 0; bars.parts.size() > 1 && i < bars.parts.size(); ++i) {
    legend += chart::legend_key(bars.parts[i], part_look(bars.parts, i), chart::Shape::Area);
  }
  std::string rows;
  for (const Bar& bar : bars.bars) {
    rows += bar_row(bars, bar, largest > 0 ? largest : 1);
  }
  return open_figure(exhibit, legend) + fmt::format("<table class=\"bars\">{}</table>\n", rows) +
         figure_foot(exhibit, medium) + "</figure>\n";
}

std::string table_figure(const Exhibit& exhibit, const Table& table, Medium medium) {
  std::string head, rows;
  for (const std::string& cell : table.header) {
    head += fmt::format("<th scope=\"col\">{}</th>", chart::escape_html(cell));
  }
  for (const auto& row : table.rows) {
    rows += "<tr>";
    for (size_t i = 0; i < row.size(); ++i) {
      rows += (i == 0 ? "<th scope=\"row\">" : "<td>") + chart::escape_html(row[i]) + (i == 0 ? "</th>" : "</td>");
    }
    rows += "</tr>\n";
  }
  return open_figure(exhibit, "") +
         fmt::format(
             "<div class=\"scroll\"><table "
             "class=\"numbers\"><thead><tr>{}</tr></thead><tbody>\n{}</tbody></table></div>\n",
             head, rows) +
         figure_foot(exhibit, medium) + "</figure>\n";
}

std::string schedule_figure(const Exhibit& exhibit, const Schedule& schedule, Medium medium) {
  return open_figure(exhibit, "") + "<div class=\"scroll\">" +
         schedule_svg(schedule, exhibit.title, "style=\"min-width: 760px\"") + "</div>\n" +
         figure_foot(exhibit, medium) + "</figure>\n";
}

}  // namespace

std::string figure_foot(const Exhibit& exhibit, Medium medium) {
  const std::string link =
      medium == Medium::Page ? fmt::format(" <a href=\"{}.csv\">Numbers</a>", chart::escape_html(exhibit.file)) : "";
  return fmt::format("<p class=\"made\">{}{}</p>\n", chart::escape_html(exhibit.made), link);
}

std::string exhibit_figure(const Exhibit& exhibit, Medium medium) {
  if (const auto* plot = std::get_if<Plot>(&exhibit.content)) {
    return plot_figure(exhibit, *plot, medium);
  }
  if (const auto* bars = std::get_if<Bars>(&exhibit.content)) {
    return bars_figure(exhibit, *bars, medium);
  }
  if (const auto* schedule = std::get_if<Schedule>(&exhibit.content)) {
    return schedule_figure(exhibit, *schedule, medium);
  }
  return table_figure(exhibit, std::get<Table>(exhibit.content), medium);
}

}  // namespace snug::cli
