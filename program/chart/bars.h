#pragma once
// bar_chart: amounts that add up, one bar each, all from the same zero.
//
//   page += bar_chart({.title = "Time",
//                      .parts = {{"seconds", "series-2"}},
//                      .bars = {{"FP32", {3.1}}, {"BF16", {1.9}}}});

#include <string>
#include <vector>

#include "program/chart/figure.h"
#include "program/chart/quantity.h"

namespace snug::chart {

struct BarPart {
  std::string name;  ///< in the legend, if the chart has several parts; empty: not in the legend
  std::string look;
};

struct Bar {
  std::string name;
  std::vector<double> values;  ///< one for each part; negative values and values that are not finite count as 0
  std::string note = {};       ///< behind the sum
};

struct BarChart {
  std::string title;
  std::string caption = {};
  Quantity quantity = Quantity::Number;
  std::vector<BarPart> parts = {};  ///< from the left
  std::vector<Bar> bars = {};
  std::string made = {};     ///< below: the origin of the numbers
  std::string numbers = {};  ///< the file with the numbers; a page links to the file
};

/// Shows each bar's name, parts, sum of parts and note. Over the full width of the page.
std::string bar_chart(const BarChart& chart, Medium medium = Medium::Page);

}  // namespace snug::chart
