// Offloading to a file on a CPU: a plan within the bytes that SaveOnHost takes, against SaveOnHost. The model is a GPT
// of 12 blocks. All ways take turns step by step; "again" is SaveOnHost a second time, which shows what the machine
// can tell.
//
//   benchmark_offload DIRECTORY [TURNS]

#include "snug/offload.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/chart/median.h"
#include "program/models/gpt.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace {

using snug::chart::median;
using torch::Tensor;

struct Way {
  std::string name;
  std::function<Tensor()> forward;
  int64_t peak_bytes = 0;
  std::vector<double> seconds = {};
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: benchmark_offload DIRECTORY [TURNS]\n";
    return 2;
  }
  const std::string directory = argv[1];
  const int turns = argc > 2 ? std::atoi(argv[2]) : 21;
  torch::manual_seed(1);
  const snug::GptOptions options{.vocab = 512, .context = 256, .layers = 12, .heads = 8, .width = 256};
  snug::Gpt model(options);
  const Tensor tokens = torch::randint(options.vocab, {8, options.context});
  const Tensor targets = torch::randint(options.vocab, {8, options.context});
  const auto loss = [&] {
    return torch::nn::functional::cross_entropy(model->forward(tokens).flatten(0, 1), targets.flatten());
  };
  const auto drop_gradients = [&] {
    for (const Tensor& parameter : model->parameters()) {
      parameter.mutable_grad() = Tensor();
    }
  };
  const auto step = [&](Way& way, bool is_measured) {
    drop_gradients();
    const auto start = std::chrono::steady_clock::now();
    way.forward().backward();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (is_measured) {
      way.seconds.push_back(seconds);
    }
  };
  const auto on_host = [&] {
    const snug::SaveOnHost scope({.directory = directory});
    return loss();
  };
  const auto peak_of = [&](Way& way) {
    step(way, false);
    drop_gradients();
    const snug::MemoryMeter meter;
    way.forward().backward();
    return meter.report().peak_bytes;
  };
  std::vector<Way> ways{{"plain", loss}, {"SaveOnHost", on_host}, {"SaveOnHost again", on_host}};
  for (Way& way : ways) {
    way.peak_bytes = peak_of(way);
  }
  drop_gradients();
  const snug::OffloadLink link = snug::measure_offload_link(directory);
  const snug::plan::Profile plain_profile = snug::detail::profile_step(loss);
  snug::plan::Profile profile = plain_profile;
  profile.link = link;
  const snug::Bytes budget(ways[1].peak_bytes);
  const snug::ActivationPlan plan = snug::detail::unverified_plan(profile, budget);
  const snug::ActivationPlan recomputing = snug::detail::unverified_plan(plain_profile, budget);
  const auto under = [&](const snug::ActivationPlan& chosen) {
    return [&loss, chosen] {
      const snug::Rematerialize scope(chosen);
      return loss();
    };
  };
  ways.push_back({"plan with the file", under(plan)});
  ways.push_back({"plan without", under(recomputing)});
  for (size_t i = 3; i < ways.size(); ++i) {
    ways[i].peak_bytes = peak_of(ways[i]);
  }
  for (int turn = 0; turn < turns; ++turn) {
    const size_t stride = 1 + static_cast<size_t>(turn) % (ways.size() - 1);  // five ways: each follows each other one
    for (size_t i = 0; i < ways.size(); ++i) {
      step(ways[i * stride % ways.size()], true);
    }
  }
  fmt::print("link: {:.2f} GB/s out, {:.2f} GB/s back\n", link.out_bytes_per_second / 1e9,
             link.back_bytes_per_second / 1e9);
  fmt::print("predicted: {} bytes, {:.3f} of plain; without the file {:.3f} of plain\n", plan.predicted_peak_bytes,
             plan.predicted_seconds / plan.plain_seconds, recomputing.predicted_seconds / recomputing.plain_seconds);
  fmt::print("{:<20} {:>14} {:>22} {:>12} {:>24}\n", "way", "peak bytes", "seconds to SaveOnHost", "to plain",
             "range to SaveOnHost");
  for (const Way& way : ways) {
    std::vector<double> to_host, to_plain;
    for (size_t t = 0; t < way.seconds.size(); ++t) {
      to_host.push_back(way.seconds[t] / ways[1].seconds[t]);
      to_plain.push_back(way.seconds[t] / ways[0].seconds[t]);
    }
    std::ranges::sort(to_host);
    fmt::print("{:<20} {:>14} {:>22.3f} {:>12.3f} {:>12.3f} to {:.3f}\n", way.name, way.peak_bytes, median(to_host),
               median(to_plain), to_host.front(), to_host.back());
  }
  std::cout << plan.explain();
  return 0;
}
