// Bytes at the peak of forward and backward of GPT blocks, and how often a block runs, for each way to run them; as a table and, with a
// file name, as a figure over the depth.
//
// usage: activation_memory [FILE.svg]

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>

#include <fmt/format.h>

#include "tests/support/depth_techniques.h"

namespace {

using snug::testing::DepthShape;

constexpr std::array<int64_t, 6> kDepths{3, 6, 12, 24, 48, 96};
constexpr double kWidth = 760, kHeight = 380, kLeft = 70, kTop = 16, kBottom = 44, kLegend = 190;
// Okabe & Ito 2008, with dashes for those who see no colours.
constexpr std::array kLooks{"stroke=\"#000000\"",
                            "stroke=\"#d55e00\" stroke-dasharray=\"2 4\"",
                            "stroke=\"#e69f00\" stroke-dasharray=\"8 4\"",
                            "stroke=\"#0072b2\" stroke-dasharray=\"8 3 2 3\"",
                            "stroke=\"#009e73\" stroke-dasharray=\"4 4\"",
                            "stroke=\"#cc79a7\" stroke-dasharray=\"12 3\"",
                            "stroke=\"#56b4e9\" stroke-dasharray=\"1 3\""};

struct Curve {
  std::string name;
  std::vector<int64_t> peaks;  // one per depth
};

std::string drawing(const std::vector<Curve>& curves) {
  int64_t low = curves.front().peaks.front(), high = low;
  for (const Curve& curve : curves) {
    low = std::min(low, *std::min_element(curve.peaks.begin(), curve.peaks.end()));
    high = std::max(high, *std::max_element(curve.peaks.begin(), curve.peaks.end()));
  }
  const auto log = [](int64_t value) { return std::log2(static_cast<double>(value)); };
  const auto x_of = [&](int64_t depth) {
    return kLeft + (kWidth - kLeft - kLegend) * (log(depth) - log(kDepths.front())) /
                       (log(kDepths.back()) - log(kDepths.front()));
  };
  const auto y_of = [&](int64_t peak) {
    return kTop + (kHeight - kTop - kBottom) * (log(high) - log(peak)) / (log(high) - log(low));
  };
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
      kWidth, kHeight);
  for (int64_t tick = 1 << 10; tick <= high; tick *= 4) {
    if (tick >= low) {
      svg += fmt::format(
          "<path d=\"M{} {:.1f}H{}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
          kLeft, y_of(tick), kWidth - kLegend, kLeft - 6, y_of(tick) + 4, snug::Bytes(tick).str());
    }
  }
  for (const int64_t depth : kDepths) {
    svg +=
        fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", x_of(depth), kHeight - 28, depth);
  }
  double label = kTop + 12;
  for (size_t i = 0; i < curves.size(); ++i) {
    std::string path;
    for (size_t d = 0; d < kDepths.size(); ++d) {
      path += fmt::format("{}{:.1f} {:.1f}", d == 0 ? "M" : "L", x_of(kDepths[d]), y_of(curves[i].peaks[d]));
    }
    svg += fmt::format("<path d=\"{}\" fill=\"none\" stroke-width=\"2\" {}/>\n", path, kLooks[i % kLooks.size()]);
    svg += fmt::format("<path d=\"M{} {}h28\" stroke-width=\"2\" {}/><text x=\"{}\" y=\"{}\">{}</text>\n",
                       kWidth - kLegend + 12, label - 4, kLooks[i % kLooks.size()], kWidth - kLegend + 46, label,
                       curves[i].name);
    label += 20;
  }
  svg += fmt::format("<text x=\"{}\" y=\"{}\">GPT blocks (both axes logarithmic)</text></svg>\n", kLeft, kHeight - 8);
  return svg;
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
      curve.peaks.push_back(cost.peak_bytes);
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
