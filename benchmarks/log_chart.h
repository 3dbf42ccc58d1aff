#pragma once
// log_chart: curves over one axis as an SVG, the values on a logarithmic scale. The benchmarks' figures.

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace snug::benchmarks {

struct Curve {
  std::string name;
  std::vector<double> values;  ///< > 0, one for each x
};

/// A place on an axis, and what is written there.
struct Tick {
  double at;
  std::string text;
};

struct LogChart {
  std::vector<double> x;
  std::vector<Tick> x_ticks;
  std::vector<Tick> y_ticks;  ///< drawn where they lie between the smallest and the largest value
  std::string x_title;
  bool log_x = false;
};

/// `curves`: one at least, each with as many values as there are x, of which there are two at least.
inline std::string log_chart(const LogChart& chart, const std::vector<Curve>& curves) {
  constexpr double kWidth = 760, kHeight = 380, kLeft = 70, kTop = 16, kBottom = 44, kLegend = 190;
  // Okabe & Ito 2008, with dashes for those who see no colours.
  constexpr std::array kLooks{"stroke=\"#000000\"",
                              "stroke=\"#d55e00\" stroke-dasharray=\"2 4\"",
                              "stroke=\"#e69f00\" stroke-dasharray=\"8 4\"",
                              "stroke=\"#0072b2\" stroke-dasharray=\"8 3 2 3\"",
                              "stroke=\"#009e73\" stroke-dasharray=\"4 4\"",
                              "stroke=\"#cc79a7\" stroke-dasharray=\"12 3\"",
                              "stroke=\"#56b4e9\" stroke-dasharray=\"1 3\""};
  double low = curves.front().values.front(), high = low;
  for (const Curve& curve : curves) {
    const auto [least, most] = std::minmax_element(curve.values.begin(), curve.values.end());
    low = std::min(low, *least);
    high = std::max(high, *most);
  }
  const auto along = [&](double x) { return chart.log_x ? std::log2(x) : x; };
  const double first = along(chart.x.front()), last = along(chart.x.back());
  const auto x_of = [&](double x) { return kLeft + (kWidth - kLeft - kLegend) * (along(x) - first) / (last - first); };
  const auto y_of = [&](double value) {
    return kTop + (kHeight - kTop - kBottom) * std::log(high / value) / std::log(high / low);
  };
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      kWidth, kHeight);
  for (const auto& [at, text] : chart.y_ticks) {
    if (at >= low && at <= high) {
      svg += fmt::format(
          "<path d=\"M{} {:.1f}H{}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
          kLeft, y_of(at), kWidth - kLegend, kLeft - 6, y_of(at) + 4, text);
    }
  }
  for (const auto& [at, text] : chart.x_ticks) {
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", x_of(at), kHeight - 28, text);
  }
  double label = kTop + 12;
  for (size_t i = 0; i < curves.size(); ++i) {
    std::string path;
    for (size_t k = 0; k < chart.x.size(); ++k) {
      path += fmt::format("{}{:.1f} {:.1f}", k == 0 ? "M" : "L", x_of(chart.x[k]), y_of(curves[i].values[k]));
    }
    const char* look = kLooks[i % kLooks.size()];
    svg += fmt::format("<path d=\"{}\" fill=\"none\" stroke-width=\"2\" {}/>\n", path, look);
    svg += fmt::format("<path d=\"M{} {}h28\" stroke-width=\"2\" {}/><text x=\"{}\" y=\"{}\">{}</text>\n",
                       kWidth - kLegend + 12, label - 4, look, kWidth - kLegend + 46, label, curves[i].name);
    label += 20;
  }
  return svg + fmt::format("<text x=\"{}\" y=\"{}\">{}</text></svg>\n", kLeft, kHeight - 8, chart.x_title);
}

}  // namespace snug::benchmarks
