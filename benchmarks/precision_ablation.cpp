// Prints the final loss of an MLP in FP32, in pure FP16, with each ingredient of mixed precision added, and with BF16, and draws the curves
// of the first five.
//
// usage: precision_ablation [STEPS [FILE.svg]]

#include "tests/support/precision_ablation.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/log_chart.h"

namespace {

using snug::benchmarks::Curve;
using snug::benchmarks::LogChart;

std::string drawing(const std::vector<Curve>& curves) {
  const size_t steps = curves.front().values.size();
  LogChart chart{.x = {}, .x_ticks = {}, .y_ticks = {}, .x_title = "optimizer steps"};
  for (size_t step = 0; step < steps; ++step) {
    chart.x.push_back(static_cast<double>(step));
    if (step % std::max<size_t>(1, steps / 3) == 0) {
      chart.x_ticks.push_back({static_cast<double>(step), fmt::format("{}", step)});
    }
  }
  for (int decade = -9; decade < 9; ++decade) {
    for (const int digit : {1, 2, 5}) {
      const double value = digit * std::pow(10, decade);
      chart.y_ticks.push_back({value, fmt::format("{:g}", value)});
    }
  }
  return log_chart(chart, curves);
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 150;
  if (steps < 2) {
    std::cerr << "usage: precision_ablation [STEPS [FILE.svg]], with at least two steps\n";
    return 2;
  }
  constexpr size_t kDrawn = 5;
  std::vector<Curve> curves;
  std::cout << "| recipe | loss after " << steps
            << " steps | error of the first gradients | zero gradients | weights that did not move |\n"
            << "|---|---|---|---|---|\n";
  for (const auto& recipe : snug::testing::kRecipes) {
    const auto run = snug::testing::train_ablation(recipe, steps);
    std::cout << fmt::format("| {} | {:.4g} | {:.2g} | {:.1f} % | {:.1f} % |\n", recipe.name, run.losses.back(),
                             run.gradient_error, 100 * run.zero_gradients, 100 * run.unchanged_weights);
    if (curves.size() < kDrawn) {
      curves.push_back({recipe.name, run.losses});
    }
  }
  if (argc > 2) {
    std::ofstream(argv[2]) << drawing(curves);
  }
}
