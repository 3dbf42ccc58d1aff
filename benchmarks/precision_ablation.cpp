// Prints the final loss of an MLP in FP32, in pure FP16, with each ingredient of mixed precision added, and with BF16,
// and draws the curves of the first five.
//
// usage: precision_ablation [STEPS [FILE.svg]]

#include "tests/support/precision_ablation.h"

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <vector>

#include <fmt/format.h>

#include "program/chart/line.h"

namespace {

namespace chart = snug::chart;

// The loss over the steps, on a logarithmic axis.
chart::Series series_of(const char* name, const std::vector<double>& losses, size_t index) {
  chart::Series series{.name = name, .look = fmt::format("series-{}", index), .points = {}};
  for (size_t step = 0; step < losses.size(); ++step) {
    series.points.push_back({static_cast<double>(step), losses[step]});
  }
  return series;
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 150;
  if (steps < 2) {
    std::cerr << "usage: precision_ablation [STEPS [FILE.svg]], with at least two steps\n";
    return 2;
  }
  constexpr size_t kDrawn = 5;
  chart::LineChart losses{.title = "Loss by recipe", .y_title = "loss", .y = {.log_base = 10}, .wide = true};
  std::cout << "| recipe | loss after " << steps
            << " steps | error of the first gradients | zero gradients | weights that did not move |\n"
            << "|---|---|---|---|---|\n";
  for (const auto& recipe : snug::testing::kRecipes) {
    const auto run = snug::testing::train_ablation(recipe, steps);
    std::cout << fmt::format("| {} | {:.4g} | {:.2g} | {:.1f} % | {:.1f} % |\n", recipe.name, run.losses.back(),
                             run.gradient_error, 100 * run.zero_gradients, 100 * run.unchanged_weights);
    if (losses.series.size() < kDrawn) {
      losses.series.push_back(series_of(recipe.name, run.losses, losses.series.size()));
    }
  }
  if (argc > 2) {
    std::ofstream(argv[2]) << chart::line_chart(losses, chart::Medium::Image);
  }
}
