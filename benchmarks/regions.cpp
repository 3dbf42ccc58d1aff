// snug::checkpoint on random models, and on regions of very many small operators.
//
// usage: regions models FIRST LAST     the random models of the tests with these seeds: for each way to checkpoint, in
//                                      how many losses, gradients and buffers have plain training's bits, and peaks
//                                      over plain training's
//        regions times                 CPU seconds of a step, plain and checkpointed: an LSTM of 1,000 cells, and
//                                      an MLP in BF16. benchmarks/peers/regions.py does the same with PyTorch's
//                                      checkpoint
//
// One thread.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/measure/measure.h"
#include "snug/checkpoint.h"
#include "snug/memory.h"
#include "tests/support/random_model.h"

namespace {

using torch::Tensor;
using Loss = std::function<Tensor(Tensor)>;

// --- random models

struct Way {
  std::string name;
  std::function<Tensor(const Loss&, const Tensor&)> run;
  int64_t same = 0, other = 0, refused = 0;
  std::vector<double> peaks = {};  // over plain training's
};

Way with(std::string name, snug::CheckpointOptions options) {
  return {std::move(name), [options](const Loss& loss, const Tensor& x) { return snug::checkpoint(options, loss, x); }};
}

std::vector<Way> ways() {
  return {with("whole model", {}),
          {"nested",
           [](const Loss& loss, const Tensor& x) {
             return snug::checkpoint([loss](const Tensor& in) { return snug::checkpoint(loss, in); }, x);
           }},
          with("save_matmuls", {.policy = snug::save_matmuls}),
          with("save all", {.policy = [](std::string_view) { return snug::Keep::Save; }}),
          with("offload all", {.policy = [](std::string_view) { return snug::Keep::Offload; }})};
}

struct Outcome {
  std::vector<Tensor> seen;
  int64_t peak_bytes;
};

// Two steps, and the buffers after the steps: running statistics must move once in each step.
Outcome two_steps(uint64_t seed, const Way* way) {
  const snug::testing::RandomModel model = snug::testing::random_model(seed);
  Outcome outcome{};
  for (int step = 0; step < 2; ++step) {
    torch::manual_seed(static_cast<uint64_t>(step));
    const snug::MemoryMeter meter;
    const Tensor loss = way == nullptr ? model.loss(model.input) : way->run(model.loss, model.input);
    loss.backward();
    outcome.peak_bytes = meter.report().peak_bytes;
    outcome.seen.push_back(loss.detach());
    outcome.seen.push_back(torch::rand({4}));
  }
  for (const auto& more : {snug::measure::gradients_of(model.leaves()), model.module->buffers()}) {
    outcome.seen.insert(outcome.seen.end(), more.begin(), more.end());
  }
  return outcome;
}

void run_models(uint64_t first, uint64_t last) {
  std::vector<Way> all = ways();
  for (uint64_t seed = first; seed <= last; ++seed) {
    const Outcome plain = two_steps(seed, nullptr);
    for (Way& way : all) {
      try {
        const Outcome outcome = two_steps(seed, &way);
        const bool is_same = snug::measure::same_bits(outcome.seen, plain.seen);
        ++(is_same ? way.same : way.other);
        way.peaks.push_back(static_cast<double>(outcome.peak_bytes) / static_cast<double>(plain.peak_bytes));
        if (!is_same || (way.name == "whole model" && way.peaks.back() > 1.2)) {
          std::fprintf(stderr, "%s, %s: %s, peak %.3f\n", way.name.c_str(),
                       snug::testing::random_model(seed).description.c_str(), is_same ? "plain bits" : "other bits",
                       way.peaks.back());
        }
      } catch (const std::exception& error) {
        ++way.refused;
        std::fprintf(stderr, "%s, %s: %.300s\n", way.name.c_str(),
                     snug::testing::random_model(seed).description.c_str(), error.what());
      }
    }
  }
  std::printf(
      "| way | plain bits | other bits | refused | peak over plain: mean | median | highest |\n|---|---|---|---|---|---|---|\n");
  for (const Way& way : all) {
    if (way.peaks.empty()) {
      fmt::print("| {} | 0 | 0 | {} | | | |\n", way.name, way.refused);
      continue;
    }
    const double sum = std::accumulate(way.peaks.begin(), way.peaks.end(), 0.0);
    const snug::measure::Spread spread = snug::measure::spread_of(way.peaks);
    fmt::print("| {} | {} | {} | {} | {:.3f} | {:.3f} | {:.3f} |\n", way.name, way.same, way.other, way.refused,
               sum / static_cast<double>(way.peaks.size()), spread.median, spread.high);
  }
}

// --- many small operators

struct Cell {
  Tensor input_weight = torch::randn({32, 128}, torch::requires_grad());
  Tensor weight = torch::randn({32, 128}, torch::requires_grad());

  Tensor unrolled(const Tensor& x, int64_t steps) const {
    Tensor h = torch::zeros({8, 32}), c = torch::zeros({8, 32});
    for (int64_t t = 0; t < steps; ++t) {
      const auto gates = (x.mm(input_weight) + h.mm(weight)).chunk(4, 1);
      c = gates[0].sigmoid() * c + gates[1].sigmoid() * gates[2].tanh();
      h = gates[3].sigmoid() * c.tanh();
    }
    return h;
  }
};

// Medians of 21 turns: plain, checkpointed, plain again.
void report(const char* name, const std::function<Tensor()>& plain, const std::function<Tensor()>& region) {
  const auto program = [](const std::function<Tensor()>& loss) {
    return [&loss] { return snug::measure::busy_seconds_of(torch::kCPU, [&] { loss().backward(); }); };
  };
  const snug::measure::Turns turns = snug::measure::take_turns({program(plain), program(region), program(plain)}, 21);
  std::printf("%-20s plain %.4f s; checkpointed over plain %.2f; plain over plain %.2f\n", name,
              turns.seconds(0).median, turns.ratio(1).median, turns.ratio(2).median);
}

void run_times() {
  const Cell cell;
  const Tensor x = torch::randn({8, 32});
  report(
      "LSTM of 1,000 cells", [&] { return cell.unrolled(x, 1000).sum(); },
      [&] { return snug::checkpoint([&](const Tensor& in) { return cell.unrolled(in, 1000); }, x).sum(); });
  torch::nn::Sequential mlp;
  for (int i = 0; i < 16; ++i) {
    mlp->push_back(torch::nn::Linear(64, 64));
    mlp->push_back(torch::nn::GELU());
  }
  mlp->to(torch::kBFloat16);
  const Tensor rows = torch::randn({32, 64}).to(torch::kBFloat16);
  report(
      "MLP in BF16", [&] { return mlp->forward(rows).sum(); },
      [&] { return snug::checkpoint([&](const Tensor& in) { return mlp->forward(in); }, rows).sum(); });
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  if (argc == 4 && std::strcmp(argv[1], "models") == 0) {
    run_models(std::stoull(argv[2]), std::stoull(argv[3]));
  } else if (argc == 2 && std::strcmp(argv[1], "times") == 0) {
    run_times();
  } else {
    std::fputs("usage: regions models FIRST LAST | regions times\n", stderr);
    return 2;
  }
  return 0;
}
