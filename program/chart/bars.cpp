#include "program/chart/bars.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "program/chart/tag.h"
#include "program/chart/text.h"

namespace snug::chart {
namespace {

double drawn_length(double value) { return std::isfinite(value) && value > 0 ? value : 0; }

double sum_of(const Bar& bar) {
  double sum = 0;
  for (const double value : bar.values) {
    sum += drawn_length(value);
  }
  return sum;
}

// The parts side by side; `scale`: units of the SVG per value.
std::string parts_of(const BarChart& chart, const Bar& bar, double scale, double height) {
  std::string rects;
  double left = 0;
  for (size_t i = 0; i < bar.values.size(); ++i) {
    const double width = drawn_length(bar.values[i]) * scale;
    rects += tag("rect", {{"class", "area " + chart.parts[i].look}, {"x", left}, {"width", width}, {"height", height}});
    left += width;
  }
  return rects;
}

std::string page_row(const BarChart& chart, const Bar& bar, double largest) {
  constexpr double kSide = 1000;
  std::string told;
  for (size_t i = 0; i < bar.values.size(); ++i) {
    const std::string& part = chart.parts[i].name;
    told += (told.empty() || part.empty() ? "" : ", ") +
            (part.empty() ? "" : part + " " + value_text(drawn_length(bar.values[i]), chart.quantity));
  }
  const std::string sum = value_text(sum_of(bar), chart.quantity);
  told = told.empty() ? sum : told;
  const std::string rects = tag("svg",
                                {{"viewBox", fmt::format("0 0 {} 10", kSide)},
                                 {"preserveAspectRatio", "none"},
                                 {"role", "img"},
                                 {"aria-label", told}},
                                parts_of(chart, bar, kSide / largest, 10));
  return tag("tr", {{"title", bar.name + ": " + told}},
             tag("th", {{"scope", "row"}}, escape_html(bar.name)) + tag("td", {{"class", "cells"}}, rects) +
                 tag("td", {}, sum) + tag("td", {{"class", "note"}}, escape_html(bar.note))) +
         "\n";
}

// Names, bars, sums and notes in columns as wide as their texts; the bars take the remaining width.
std::string image_of(const Heading& heading, const BarChart& chart, double largest) {
  constexpr double kWidth = 1060, kMargin = 20, kGap = 14, kRow = 28, kBar = 20, kLeast = 120;
  double names = 0, sums = 0, notes = 0;
  for (const Bar& bar : chart.bars) {
    names = std::max(names, text_width(bar.name));
    sums = std::max(sums, text_width(value_text(sum_of(bar), chart.quantity)));
    notes = std::max(notes, text_width(bar.note));
  }
  const double left = kMargin + names + kGap;
  const double length = std::max(kLeast, kWidth - kMargin - left - sums - notes - 2 * kGap);
  const double sums_end = left + length + kGap + sums;
  std::string svg;
  for (size_t i = 0; i < chart.bars.size(); ++i) {
    const Bar& bar = chart.bars[i];
    const double top = 10 + kRow * static_cast<double>(i), base = top + kBar - 6;
    svg += svg_text(kMargin, base, "", bar.name);
    svg += moved(left, top, parts_of(chart, bar, length / largest, kBar));
    svg += svg_text(sums_end, base, "end", value_text(sum_of(bar), chart.quantity));
    svg += svg_text(sums_end + kGap, base, "soft", bar.note);
  }
  return image_figure(heading, svg, kWidth, 14 + kRow * static_cast<double>(chart.bars.size()));
}

}  // namespace

std::string bar_chart(const BarChart& chart, Medium medium) {
  Heading heading{.title = chart.title, .caption = chart.caption, .made = chart.made, .numbers = chart.numbers};
  heading.wide = true;
  for (const BarPart& part : chart.parts) {
    if (chart.parts.size() > 1 && !part.name.empty()) {
      heading.keys.push_back({part.name, part.look, Shape::Area});
    }
  }
  double largest = 0;
  for (const Bar& bar : chart.bars) {
    largest = std::max(largest, sum_of(bar));
  }
  largest = largest > 0 ? largest : 1;
  if (medium == Medium::Image) {
    return image_of(heading, chart, largest);
  }
  std::string rows;
  for (const Bar& bar : chart.bars) {
    rows += page_row(chart, bar, largest);
  }
  return page_figure(heading, tag("table", {{"class", "bars"}}, rows) + "\n");
}

}  // namespace snug::chart
