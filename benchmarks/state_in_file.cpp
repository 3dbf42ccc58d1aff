// An optimizer's step with its state in a file, against its step with the state in memory, on the parameters of a GPT.
// All ways take turns; "again" is a way a second time. Differences as large as between a way and "again" mean nothing.
//
//   benchmark_state_in_file DIRECTORY [TURNS [WIDTH [WINDOW]]]      (384: 10.8 million parameters, 768: 42.9 million)

#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "benchmarks/gpt_parameters.h"
#include "program/measure/measure.h"
#include "snug/adamw.h"
#include "snug/memory.h"
#include "snug/offload.h"

namespace {

struct Way {
  std::string name;
  std::unique_ptr<snug::FusedOptimizer> optimizer;
  int64_t peak_bytes = 0;  // of the first step, which makes the state
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: benchmark_state_in_file DIRECTORY [TURNS [WIDTH [WINDOW]]]\n";
    return 2;
  }
  const snug::StateFile file{.directory = argv[1],
                             .window = argc > 4 ? snug::Bytes::parse(argv[4]) : snug::StateFile().window};
  const int turns = argc > 2 ? std::atoi(argv[2]) : 11;
  const int64_t width = argc > 3 ? std::atoi(argv[3]) : 768;
  const auto parameters = snug::benchmarks::gpt_parameters(width, torch::kCPU);
  std::vector<Way> ways;
  const auto add = [&](std::string name, std::unique_ptr<snug::FusedOptimizer> optimizer, bool in_file) {
    if (in_file) {
      optimizer->keep_state_in(file);
    }
    const snug::MemoryMeter meter;
    optimizer->step();
    ways.push_back({std::move(name), std::move(optimizer), meter.report().peak_bytes});
  };
  const auto adamw = [&] { return std::make_unique<snug::AdamW>(parameters, snug::AdamWOptions{.lr = 1e-4}); };
  const auto in_8_bits = [&] {
    return std::make_unique<snug::AdamW8bit>(parameters, snug::AdamW8bitOptions{.lr = 1e-4});
  };
  add("AdamW", adamw(), false);
  add("AdamW again", adamw(), false);
  add("AdamW in a file", adamw(), true);
  add("AdamW in a file again", adamw(), true);
  add("AdamW8bit", in_8_bits(), false);
  add("AdamW8bit in a file", in_8_bits(), true);
  std::vector<std::function<double()>> programs;
  for (const Way& way : ways) {
    programs.emplace_back([&way] { return snug::measure::seconds_of(torch::kCPU, [&] { way.optimizer->step(); }); });
  }
  const snug::measure::Turns timed = snug::measure::take_turns(programs, turns);
  const snug::OffloadLink link = snug::measure_offload_link(file.directory);
  fmt::print("link: {:.2f} GB/s out, {:.2f} GB/s back; window {}; {} threads\n", link.out_bytes_per_second / 1e9,
             link.back_bytes_per_second / 1e9, file.window.str(), at::get_num_threads());
  fmt::print("{:<24}{:>14}{:>12}{:>12}{:>16}{:>20}{:>14}\n", "way", "peak bytes", "median ms", "to AdamW", "range",
             "bound of link, ms", "to its bound");
  for (size_t i = 0; i < ways.size(); ++i) {
    const Way& way = ways[i];
    const double seconds = timed.seconds(i).median;
    const auto [median, low, high] = timed.ratio(i);
    const int64_t moved = way.optimizer->bytes_with_state_in(way.optimizer->state_placement()).moved;
    const double bound = moved == 0 ? 0 : link.out_seconds(moved) + link.back_seconds(moved);
    fmt::print("{:<24}{:>14}{:>12.1f}{:>12.3f}{:>8.2f} to {:.2f}{:>18.1f}{:>14}\n", way.name, way.peak_bytes,
               1e3 * seconds, median, low, high, 1e3 * bound, moved == 0 ? "" : fmt::format("{:.2f}", seconds / bound));
  }
  return 0;
}
