// Draws what benchmarks/budget_sweep.py has measured: the time of a step over its bytes, a line for each way to take
// fewer.
//
// usage: budget_sweep_figure CSV MODEL TITLE > FIGURE.svg

#include <algorithm>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "snug/chart/line.h"

namespace {

namespace chart = snug::chart;

constexpr double kMostTime = 2;  // slower ones lie at the upper edge, so that the others are told apart

struct Row {
  std::string language;
  std::string method;
  double bytes;
  double time;
};

std::vector<Row> rows_of(const std::string& model, const std::string& path) {
  std::vector<Row> rows;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream text(line);
    std::vector<std::string> fields;
    for (std::string field; std::getline(text, field, ',');) {
      fields.push_back(field);
    }
    if (fields.size() > 5 && fields[0] == model) {
      rows.push_back({fields[1], fields[2], std::stod(fields[4]), std::stod(fields[5])});
    }
  }
  return rows;
}

chart::Series& series_of(chart::LineChart& times, const std::string& name) {
  const auto found =
      std::find_if(times.series.begin(), times.series.end(), [&](const auto& one) { return one.name == name; });
  if (found != times.series.end()) {
    return *found;
  }
  return times.series.emplace_back(chart::Series{
      .name = name, .look = fmt::format("series-{}", times.series.size()), .drawn = chart::Drawn::LineAndPoints});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: budget_sweep_figure CSV MODEL TITLE\n";
    return 2;
  }
  chart::LineChart times{
      .title = argv[3],
      .caption = "against keeping everything in the same language; what takes longer than 2 is drawn at 2",
      .x_title = "activation peak, %",
      .x = chart::AxisOptions{.from_zero = true, .tight = true},
      .y_title = "time of a step",
      .wide = true};
  std::map<std::string, double> plain;  // bytes, by language; these rows come first
  for (const Row& row : rows_of(argv[2], argv[1])) {
    if (row.method == "keep everything") {
      plain[row.language] = row.bytes;
    } else {
      const std::string name = (row.language == "C++" ? "snug: " : "Python: ") + row.method;
      series_of(times, name)
          .points.push_back({100 * row.bytes / plain.at(row.language), std::min(row.time, kMostTime)});
    }
  }
  for (chart::Series& series : times.series) {
    std::sort(series.points.begin(), series.points.end(), [](const auto& a, const auto& b) { return a.x < b.x; });
  }
  std::cout << chart::line_chart(times, chart::Medium::Image);
}
