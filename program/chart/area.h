#pragma once
// area_chart: amounts that add up to a total, stacked upon each other over the optimizer step.
//
//   page += area_chart({.title = "Memory", .x = steps, .layers = {{"parameters", "parameters", values}}});

#include <string>
#include <vector>

#include "program/chart/axis.h"
#include "program/chart/figure.h"

namespace snug::chart {

struct Layer {
  std::string name;
  std::string look;
  std::vector<double> values;  ///< one per x; negative values and values that are not finite count as 0
};

struct AreaChart {
  std::string title;
  std::string caption = {};
  std::vector<double> x = {};      ///< ascending
  std::vector<Layer> layers = {};  ///< from the bottom up
  AxisOptions y = {};              ///< begins at zero in any case
};

/// Layers stacked upon each other over the step, over the full width of the page. Of many x, one x per pixel column is
/// drawn: the x with the highest stack.
std::string area_chart(const AreaChart& chart, Medium medium = Medium::Page);

}  // namespace snug::chart
