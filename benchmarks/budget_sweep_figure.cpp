// Draws what benchmarks/budget_sweep.py has measured: the time of a step over its bytes, a line for each way to take
// fewer, and the spread of each point.
//
// usage: budget_sweep_figure CSV MODEL TITLE > FIGURE.svg

#include <algorithm>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "program/chart/line.h"

namespace {

namespace chart = snug::chart;

constexpr double kMostTime = 2;  // slower ones lie at the upper edge, so that the others are told apart

struct Row {
  std::string language;
  std::string method;
  double bytes;
  double time, lowest, highest;
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
    if (fields.size() > 7 && fields[0] == model) {
      rows.push_back({fields[1], fields[2], std::stod(fields[4]), std::stod(fields[5]), std::stod(fields[6]),
                      std::stod(fields[7])});
    }
  }
  return rows;
}

// Budgets in between lie on the line. Of ways by hand there are just these points.
chart::Drawn drawn(const std::string& method) {
  return method == "automatic" || method == "torch.compile" ? chart::Drawn::LineAndPoints : chart::Drawn::Points;
}

chart::Series& series_of(chart::LineChart& times, const Row& row) {
  const std::string name =
      row.method == "automatic" ? "snug: a plan" : (row.language == "C++" ? "snug: " : "Python: ") + row.method;
  const auto found =
      std::find_if(times.series.begin(), times.series.end(), [&](const auto& one) { return one.name == name; });
  if (found != times.series.end()) {
    return *found;
  }
  return times.series.emplace_back(
      chart::Series{.name = name, .look = fmt::format("series-{}", times.series.size()), .drawn = drawn(row.method)});
}

// A line from the lowest to the highest.
void add_spread(chart::Series& spread, double x, const Row& row) {
  spread.points.push_back({x, std::min(row.lowest, kMostTime)});
  spread.points.push_back({x, std::min(row.highest, kMostTime)});
  spread.points.push_back({x, std::numeric_limits<double>::quiet_NaN()});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: budget_sweep_figure CSV MODEL TITLE\n";
    return 2;
  }
  chart::LineChart times{
      .title = argv[3],
      .caption = "against keeping everything in the same language; lines up and down: lowest to highest; over 2: at 2",
      .x_title = "activation peak, %",
      .x = chart::AxisOptions{.from_zero = true, .tight = true},
      .y_title = "time of a step",
      .wide = true};
  std::map<std::string, double> plain;           // bytes, by language; these rows come first
  std::map<std::string, chart::Series> spreads;  // by look
  for (const Row& row : rows_of(argv[2], argv[1])) {
    if (row.method == "keep everything") {
      plain[row.language] = row.bytes;
    } else {
      chart::Series& series = series_of(times, row);
      series.points.push_back({100 * row.bytes / plain.at(row.language), std::min(row.time, kMostTime)});
      chart::Series& spread = spreads[series.look];
      spread.look = series.look;
      spread.drawn = chart::Drawn::BareLine;
      spread.marks_gaps = false;
      add_spread(spread, series.points.back().x, row);
    }
  }
  for (chart::Series& series : times.series) {
    std::sort(series.points.begin(), series.points.end(), [](const auto& a, const auto& b) { return a.x < b.x; });
  }
  for (auto& [look, spread] : spreads) {
    std::stable_sort(spread.points.begin(), spread.points.end(),
                     [](const auto& a, const auto& b) { return a.x < b.x; });
    times.series.push_back(std::move(spread));
  }
  std::cout << chart::line_chart(times, chart::Medium::Image);
}
