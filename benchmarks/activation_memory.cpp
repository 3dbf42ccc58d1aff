// Bytes at the peak of forward and backward of GPT blocks, and how often a block runs, for each way to run them; as a
// table and, with a file name, as a figure over the depth.
//
// usage: activation_memory [FILE.svg]

#include <array>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "program/chart/line.h"
#include "tests/support/depth_techniques.h"

namespace {

namespace chart = snug::chart;
using snug::testing::DepthShape;

constexpr std::array<int64_t, 6> kDepths{3, 6, 12, 24, 48, 96};

}  // namespace

int main(int argc, char** argv) {
  const DepthShape shape{.batch = 2, .time = 128, .width = 128};
  std::cout << fmt::format(
      "{} x {} tokens, d = {}, FP32: peak of forward and backward above the level with all gradients\n\n", shape.batch,
      shape.time, shape.width);
  std::cout << "| GPT blocks: 24 | peak | of plain | blocks run |\n|---|---|---|---|\n";
  chart::LineChart peaks{.title = "Peak of forward and backward over the depth",
                         .caption = "both axes logarithmic",
                         .x_title = "GPT blocks",
                         .x = chart::AxisOptions{.log_base = 2},
                         .y_title = "peak",
                         .y = {.quantity = chart::Quantity::Bytes, .log_base = 2},
                         .wide = true};
  double plain = 0;
  for (const auto& technique : snug::testing::techniques()) {
    chart::Series curve{.name = technique.name, .look = fmt::format("series-{}", peaks.series.size()), .points = {}};
    for (const int64_t depth : kDepths) {
      const auto cost = snug::testing::measure(technique, depth, shape);
      curve.points.push_back({static_cast<double>(depth), static_cast<double>(cost.peak_bytes)});
      if (depth == 24) {
        plain = plain == 0 ? static_cast<double>(cost.peak_bytes) : plain;
        std::cout << fmt::format("| {} | {} | {:.1f} % | {} |\n", technique.name, snug::Bytes(cost.peak_bytes).str(),
                                 100 * static_cast<double>(cost.peak_bytes) / plain, cost.calls);
      }
    }
    peaks.series.push_back(std::move(curve));
  }
  if (argc > 1) {
    std::ofstream(argv[1]) << chart::line_chart(peaks, chart::Medium::Image);
  }
}
