// A figure of the page as an image file. HTML finds its height by itself, and an image must know it beforehand: it is estimated from the
// lengths of texts, rather too large than too small.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cli/compare/exhibit_figures.h"
#include "snug/chart/style.h"
#include "snug/chart/text.h"

namespace snug::cli {
namespace {

constexpr double kWide = 1060, kNarrow = 540;
constexpr double kPadding = 46;  // left and right of a figure
constexpr double kLetter = 7;    // the width of one, at most

bool is_wide(const Exhibit& exhibit) {
  const auto* plot = std::get_if<Plot>(&exhibit.content);
  return plot == nullptr || plot->wide;
}

// Of pieces that are set one after the other, in rows of their own where they do not fit behind others.
double rows_of(const std::vector<double>& lengths, double width) {
  double rows = 1, filled = 0;
  for (const double length : lengths) {
    if (filled + length > width && filled > 0) {
      ++rows;
      filled = 0;
    }
    filled += length;
    rows += std::max(0.0, std::ceil(length / width) - 1);
  }
  return rows;
}

double length_of(const std::string& text) { return kLetter * static_cast<double>(text.size()); }

double legend_height(const Exhibit& exhibit, double width) {
  std::vector<double> keys;
  if (const auto* plot = std::get_if<Plot>(&exhibit.content)) {
    std::transform(plot->curves.begin(), plot->curves.end(), std::back_inserter(keys),
                   [](const Curve& curve) { return 48 + length_of(curve.name); });
  } else {
    const auto& parts = std::get<Bars>(exhibit.content).parts;
    std::transform(parts.begin(), parts.end(), std::back_inserter(keys),
                   [](const std::string& part) { return 48 + length_of(part); });
  }
  return 22 * rows_of(keys, width);
}

double height_of(const Exhibit& exhibit) {
  const double width = (is_wide(exhibit) ? kWide : kNarrow) - kPadding;
  const double head =
      24 * rows_of({1.2 * length_of(exhibit.title), length_of(exhibit.caption)}, width) + legend_height(exhibit, width);
  const double foot = 10 + 19 * std::ceil(length_of(exhibit.made) / width);
  const auto* bars = std::get_if<Bars>(&exhibit.content);
  const double body = bars != nullptr ? 25 + 28 * static_cast<double>(bars->bars.size()) : is_wide(exhibit) ? 368 : 258;
  return 40 + head + body + foot;
}

// HTML gives an <svg> its name space, XML does not.
std::string with_name_spaces(std::string html) {
  const std::string tag = "<svg ", named = "<svg xmlns=\"http://www.w3.org/2000/svg\" ";
  for (size_t at = html.find(tag); at != std::string::npos; at = html.find(tag, at + named.size())) {
    html.replace(at, tag.size(), named);
  }
  return html;
}

}  // namespace

std::string figure_image(const Exhibit& exhibit) {
  const double width = is_wide(exhibit) ? kWide : kNarrow, height = height_of(exhibit);
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "role=\"img\" aria-label=\"{2}\">\n"
      "<foreignObject width=\"{0:.0f}\" height=\"{1:.0f}\">\n<body xmlns=\"http://www.w3.org/1999/xhtml\">\n"
      "<style>{3}body {{ background: none; }} .chart {{ box-shadow: none; "
      "}}</style>\n{4}</body>\n</foreignObject>\n</svg>\n",
      width, height, chart::escape_html(exhibit.title), chart::kPageStyle,
      with_name_spaces(exhibit_figure(exhibit, Medium::Image)));
}

}  // namespace snug::cli
