// Bytes at the peak of forward and backward of GPT blocks, and how often a block runs, for each way to run them; as a table and, with a
// file name, as a figure over the depth.
//
// usage: activation_memory [FILE.svg]

#include <array>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/log_chart.h"
#include "tests/support/depth_techniques.h"

namespace {

using snug::benchmarks::Curve;
using snug::benchmarks::LogChart;
using snug::testing::DepthShape;

constexpr std::array<int64_t, 6> kDepths{3, 6, 12, 24, 48, 96};

std::string drawing(const std::vector<Curve>& curves) {
  LogChart chart{.x = {}, .x_ticks = {}, .y_ticks = {}, .x_title = "GPT blocks (both axes logarithmic)", .log_x = true};
  for (const int64_t depth : kDepths) {
    chart.x.push_back(static_cast<double>(depth));
    chart.x_ticks.push_back({static_cast<double>(depth), fmt::format("{}", depth)});
  }
  for (int64_t tick = int64_t{1} << 10; tick <= int64_t{1} << 50; tick *= 4) {
    chart.y_ticks.push_back({static_cast<double>(tick), snug::Bytes(tick).str()});
  }
  return log_chart(chart, curves);
}

}  // namespace

int main(int argc, char** argv) {
  const DepthShape shape{.batch = 2, .time = 128, .width = 128};
  std::cout << fmt::format(
      "{} x {} tokens, d = {}, FP32: peak of forward and backward above the level with all gradients\n\n", shape.batch,
      shape.time, shape.width);
  std::cout << "| GPT blocks: 24 | peak | of plain | blocks run |\n|---|---|---|---|\n";
  std::vector<Curve> curves;
  double plain = 0;
  for (const auto& technique : snug::testing::techniques()) {
    Curve curve{technique.name, {}};
    for (const int64_t depth : kDepths) {
      const auto cost = snug::testing::measure(technique, depth, shape);
      curve.values.push_back(static_cast<double>(cost.peak_bytes));
      if (depth == 24) {
        plain = plain == 0 ? static_cast<double>(cost.peak_bytes) : plain;
        std::cout << fmt::format("| {} | {} | {:.1f} % | {} |\n", technique.name, snug::Bytes(cost.peak_bytes).str(),
                                 100 * static_cast<double>(cost.peak_bytes) / plain, cost.calls);
      }
    }
    curves.push_back(std::move(curve));
  }
  if (argc > 1) {
    std::ofstream(argv[1]) << drawing(curves);
  }
}
