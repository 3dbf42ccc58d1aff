// Prints the final loss of an MLP in FP32, in pure FP16, and with each ingredient of mixed precision added, and draws the five curves.
//
// usage: precision_ablation [STEPS [FILE.svg]]

#include "tests/support/precision_ablation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace {

using snug::testing::AblationRun;

constexpr double kWidth = 720, kHeight = 320, kLeft = 60, kTop = 16, kBottom = 40, kLegend = 170;
// Okabe & Ito 2008, with dashes for those who see no colours.
constexpr std::array kLooks{
    "stroke=\"#000000\"", "stroke=\"#d55e00\" stroke-dasharray=\"2 4\"", "stroke=\"#e69f00\" stroke-dasharray=\"8 4\"",
    "stroke=\"#0072b2\" stroke-dasharray=\"8 3 2 3\"", "stroke=\"#009e73\" stroke-dasharray=\"4 4\""};

std::string drawing(const std::vector<std::pair<std::string, AblationRun>>& runs) {
  double low = 1e300, high = 0;
  for (const auto& [name, run] : runs) {
    low = std::min(low, *std::min_element(run.losses.begin(), run.losses.end()));
    high = std::max(high, *std::max_element(run.losses.begin(), run.losses.end()));
  }
  const auto steps = static_cast<double>(runs.front().second.losses.size());
  const auto x_of = [&](double step) { return kLeft + (kWidth - kLeft - kLegend) * step / steps; };
  const auto y_of = [&](double loss) {
    return kTop + (kHeight - kTop - kBottom) * std::log(high / loss) / std::log(high / low);
  };
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      kWidth, kHeight);
  for (double tick = std::pow(10, std::floor(std::log10(low))); tick <= high; tick *= 10) {
    for (const double value : {tick, 2 * tick, 5 * tick}) {
      if (value >= low && value <= high) {
        svg += fmt::format(
            "<path d=\"M{} {:.1f}H{}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
            kLeft, y_of(value), kWidth - kLegend, kLeft - 6, y_of(value) + 4, value);
      }
    }
  }
  double label = kTop + 12;
  for (size_t i = 0; i < runs.size(); ++i) {
    std::string path;
    for (size_t step = 0; step < runs[i].second.losses.size(); ++step) {
      path += fmt::format("{}{:.1f} {:.1f}", step == 0 ? "M" : "L", x_of(static_cast<double>(step)),
                          y_of(runs[i].second.losses[step]));
    }
    svg += fmt::format("<path d=\"{}\" fill=\"none\" stroke-width=\"2\" {}/>\n", path, kLooks[i % kLooks.size()]);
    svg += fmt::format("<path d=\"M{} {}h28\" stroke-width=\"2\" {}/><text x=\"{}\" y=\"{}\">{}</text>\n",
                       kWidth - kLegend + 12, label - 4, kLooks[i % kLooks.size()], kWidth - kLegend + 46, label,
                       runs[i].first);
    label += 20;
  }
  svg += fmt::format("<text x=\"{}\" y=\"{}\">optimizer step, to {}</text></svg>\n", kLeft, kHeight - 14, steps);
  return svg;
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 150;
  if (steps < 1) {
    std::cerr << "usage: precision_ablation [STEPS [FILE.svg]], with at least one step\n";
    return 2;
  }
  std::vector<std::pair<std::string, AblationRun>> runs;
  std::cout << "| recipe | loss after " << steps
            << " steps | zero gradients | weights that did not move |\n|---|---|---|---|\n";
  for (const auto& [recipe, name] : snug::testing::kRecipes) {
    runs.emplace_back(name, snug::testing::train_ablation(recipe, steps));
    const AblationRun& run = runs.back().second;
    std::cout << fmt::format("| {} | {:.4g} | {:.1f} % | {:.1f} % |\n", name, run.losses.back(),
                             100 * run.zero_gradients, 100 * run.unchanged_weights);
  }
  if (argc > 2) {
    std::ofstream(argv[2]) << drawing(runs);
  }
}
