// The largest GPT (12 blocks, 8 sequences of 256 tokens a step) that trains in a number of bytes of tensors, for ways
// of training with plans, and the speed. Widths are tried in steps of 32. The width of the last row is given, because a
// model in files is limited by the disk and by patience. `snug compare fit` does the same for techniques by hand.
//
//   benchmark_largest_gpt DIRECTORY [LIMIT [WIDTH-IN-FILES]]      (1GiB, 1696: 415 million parameters)

#include <cstdlib>
#include <iostream>

#include <fmt/format.h>

#include "program/measure/gpt_training.h"
#include "snug/core.h"

namespace {

using snug::measure::GptWay;

constexpr GptWay kWays[] = {
    {.name = "plain LibTorch"},
    {.name = "micro-batches of 1", .splits = true},
    {.name = "plan", .splits = true, .plans = true},
    {.name = "plan, AdamW8bit in BF16 (rounds)",
     .splits = true,
     .eight_bits = true,
     .has_split_weights = true,
     .plans = true},
    {.name = "plan, state in a file", .splits = true, .plans = true, .state_in_file = true},
    {.name = "plan, weights, gradients and state in files", .splits = true, .plans = true, .all_in_files = true},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: benchmark_largest_gpt DIRECTORY [LIMIT [WIDTH-IN-FILES]]\n";
    return 2;
  }
  const snug::Bytes limit = snug::Bytes::parse(argc > 2 ? argv[2] : "1GiB");
  const int64_t width_in_files = argc > 3 ? std::atoi(argv[3]) : 1696;
  const snug::measure::GptSizes sizes{
      .limit = limit.count(), .layers = 12, .context = 256, .batch = 8, .directory = argv[1]};
  std::cout << "| way | width | parameters | peak of a step | s a step | tokens/s |\n|---|---|---|---|---|---|\n";
  int64_t plain = sizes.width_unit;  // each way trains the width of plain LibTorch
  for (const GptWay& way : kWays) {
    const int64_t width = way.all_in_files ? width_in_files : widest_gpt(way, sizes, plain);
    plain = way.splits ? plain : width;
    const auto found = measure_gpt(way, sizes, width);
    std::cout << fmt::format("| {} | {} | {:.1f} M | {} | {:.1f} | {:.0f} |", way.name, width,
                             static_cast<double>(found.parameters) / 1e6, snug::Bytes(found.peak_bytes).str(),
                             found.seconds, found.tokens_per_second)
              << std::endl;
  }
}
