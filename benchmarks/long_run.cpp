// What thousands of steps of shapes that change leave behind: resident memory, bytes of tensors, open files, threads.
// Each run is a process of its own. The budgets bind: plans are made, carried out and replaced.
//
//   benchmark_long_run [STEPS [MODEL]]                     gpt, convolutions, or both, each without and with a budget
//   benchmark_long_run one-step                            one step of several models: the process against the meter

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <malloc.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include "program/models/gpt.h"
#include "program/models/resnet.h"
#include "snug/snug.h"
#include "tests/support/process_figures.h"

namespace {

using snug::testing::process_figures;
using snug::testing::ProcessFigures;
using torch::Tensor;

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Calls `run` in a process of its own.
void in_a_process(const std::function<void()>& run) {
  std::cout.flush();
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      run();
      std::cout.flush();
      std::_Exit(0);
    } catch (const std::exception& error) {
      std::cerr << "long_run: " << error.what() << "\n";
    }
    std::_Exit(1);
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child || status != 0) {
    std::cerr << "long_run: a run failed\n";
    std::exit(1);
  }
}

snug::Loss mean_loss(const Tensor& logits, const Tensor& targets) {
  return snug::Loss::mean(torch::nn::functional::cross_entropy(logits.flatten(0, -2), targets.flatten()),
                          targets.numel());
}

torch::nn::Sequential convolutions() {
  using namespace torch::nn;
  return Sequential(Conv2d(Conv2dOptions(3, 8, 3).padding(1)), GELU(), Conv2d(Conv2dOptions(8, 8, 3).padding(1)),
                    GELU(), AdaptiveAvgPool2d(1), Flatten(), Linear(8, 10));
}

// A model, and batches of it in `sizes`: items, and tokens or pixels of an item's side.
struct Subject {
  std::string name;
  snug::Bytes budget;  // it binds for the larger batches
  int64_t most_items, least_size, most_size;

  bool is_gpt() const { return name == "gpt"; }
  snug::Batch batch(int64_t items, int64_t size) const {
    return is_gpt() ? snug::Batch{torch::randint(256, {items, size}), torch::randint(256, {items, size})}
                    : snug::Batch{torch::randn({items, 3, size, size}), torch::randint(10, {items})};
  }
};

const std::vector<Subject> kSubjects{
    {"gpt", snug::Bytes::parse("2MiB"), 8, 4, 32},
    {"convolutions", snug::Bytes::parse("1MiB"), 8, 8, 32},
};

struct MallocBytes {
  int64_t used, free;  // used: with the blocks that are mapped on their own
};
MallocBytes malloc_bytes() {
  const auto info = ::mallinfo2();
  return {static_cast<int64_t>(info.uordblks + info.hblkhd), static_cast<int64_t>(info.fordblks)};
}

// `model` takes inputs to logits.
template <class Model>
void run_steps(const Subject& subject, Model& model, snug::Bytes budget, int64_t steps) {
  snug::AdamW optimizer(model->parameters(), {.lr = 1e-4});
  snug::Stepper stepper(model, optimizer, {.budget = {.memory = budget}});
  fmt::print(
      "\n{}, {}\n\n| step | resident, MiB | of it files | malloc: used, MiB | malloc: free | live tensors, bytes "
      "| open files | threads |\n|---|---|---|---|---|---|---|---|\n",
      subject.name, budget.is_unlimited() ? "no budget" : "a budget of " + budget.str());
  ProcessFigures first, now;
  int64_t peak = 0, planned = 0, live_first = 0, live = 0;
  const auto draw = [](int64_t least, int64_t most) { return torch::randint(least, most + 1, {1}).item<int64_t>(); };
  for (int64_t step = 1; step <= steps; ++step) {
    {
      const snug::Batch batch = subject.batch(draw(1, subject.most_items), draw(subject.least_size, subject.most_size));
      const auto result =
          stepper.step(batch, [&](const snug::Batch& micro) { return mean_loss(model->forward(micro[0]), micro[1]); });
      peak = std::max(peak, result.peak_bytes);
      planned += stepper.plan() && (stepper.plan()->activations || result.micro_batches > 1) ? 1 : 0;
    }
    if (step % std::max<int64_t>(1, steps / 20) == 0) {
      now = process_figures();
      live = snug::live_bytes(torch::kCPU).count();
      const MallocBytes heap = malloc_bytes();
      fmt::print("| {} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {} | {} | {} |\n", step, mib(now.resident),
                 mib(now.of_files), mib(heap.used), mib(heap.free), live, now.open_files, now.threads);
      std::cout.flush();
    }
    if (step == std::max<int64_t>(1, steps / 10)) {
      first = now;
      live_first = live;
    }
  }
  fmt::print(
      "\nFrom step {} on: resident memory {:+.2f} %, live tensors {:+} bytes, open files {:+}, threads {:+}. Highest "
      "peak of a step: {}; {} steps were cut or recomputed.\n",
      steps / 10, 100.0 * static_cast<double>(now.resident - first.resident) / static_cast<double>(first.resident),
      live - live_first, now.open_files - first.open_files, now.threads - first.threads, snug::Bytes(peak).str(),
      planned);
}

void long_run(const Subject& subject, snug::Bytes budget, int64_t steps) {
  torch::manual_seed(1);
  if (subject.is_gpt()) {
    snug::Gpt model(snug::GptOptions{.vocab = 256, .context = subject.most_size, .layers = 2, .heads = 2, .width = 32});
    run_steps(subject, model, budget, steps);
  } else {
    torch::nn::Sequential model = convolutions();
    run_steps(subject, model, budget, steps);
  }
}

// The rise of each peak above where it was before the first step; and of the difference, as they are after the step:
// pages of programs and libraries, and blocks of malloc that hold no tensor.
template <class Model>
void steps_of(const char* name, Model& model, const snug::Batch& batch, snug::Precision precision) {
  snug::AdamW optimizer(model->parameters(), {.lr = 1e-4});
  snug::Stepper stepper(model, optimizer, {.precision = precision});
  // Under a limit snug gives back the blocks that it keeps for later tensors.
  const auto heap_without_tensors = [] {
    const int64_t live = snug::live_bytes(torch::kCPU).count();
    const snug::MemoryLimit limit(torch::kCPU, snug::Bytes(live + 4096));
    torch::empty({1});
    return malloc_bytes().used - live;
  };
  const int64_t heap_before = heap_without_tensors();
  const ProcessFigures before = process_figures();
  const int64_t live_before = snug::live_bytes(torch::kCPU).count();
  for (const char* which : {"1", "2", "3"}) {
    snug::testing::forget_peak_resident();
    const auto result =
        stepper.step(batch, [&](const snug::Batch& micro) { return mean_loss(model->forward(micro[0]), micro[1]); });
    const ProcessFigures after = process_figures();
    const int64_t of_process = after.peak_resident - before.resident, of_tensors = result.peak_bytes - live_before;
    const int64_t of_files = after.of_files - before.of_files, of_heap = heap_without_tensors() - heap_before;
    fmt::print("| {} | {} | {:.2f} | {:.2f} | {:+.2f} | {:+.2f} | {:+.2f} | {:+.2f} |\n", name, which, mib(of_process),
               mib(of_tensors), mib(of_process - of_tensors), mib(of_files), mib(of_heap),
               mib(of_process - of_tensors - of_files - of_heap));
  }
}

void meter_against_process() {
  fmt::print(
      "| model | step | peak of the process, MiB | peak of the meter, MiB | difference | file pages | malloc: used | rest "
      "|\n|---|---|---|---|---|---|---|---|\n");
  using snug::Precision;
  for (const auto& [precision, name] : {std::pair(Precision::Float32, "gpt-tiny, 32 x 128 tokens"),
                                        std::pair(Precision::BFloat16, "the same in BF16")}) {
    in_a_process([&] {
      torch::manual_seed(1);
      snug::Gpt model(snug::gpt_configuration("gpt-tiny"));
      steps_of(name, model, {torch::randint(256, {32, 128}), torch::randint(256, {32, 128})}, precision);
    });
  }
  in_a_process([] {
    torch::manual_seed(1);
    snug::ResNet model(snug::ResNetOptions{.depth = 20});
    steps_of("ResNet-20, 64 pictures", model, {torch::randn({64, 3, 32, 32}), torch::randint(10, {64})},
             Precision::Float32);
  });
  in_a_process([] {
    torch::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(512, 2048), torch::nn::GELU(), torch::nn::Linear(2048, 10));
    steps_of("MLP, 4096 rows", model, {torch::randn({4096, 512}), torch::randint(10, {4096})}, Precision::Float32);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "20000", which = argc > 2 ? argv[2] : "";
  if (what == "one-step" && argc == 2) {
    meter_against_process();
    return 0;
  }
  const int64_t steps = std::atoll(what.data());
  const auto named = [&](const Subject& subject) { return which.empty() || subject.name == which; };
  if (argc > 3 || steps < 20 || std::none_of(kSubjects.begin(), kSubjects.end(), named)) {
    std::cerr << "usage: benchmark_long_run [STEPS [gpt|convolutions]]   (at least 20)\n"
                 "       benchmark_long_run one-step\n";
    return 2;
  }
  for (const Subject& subject : kSubjects) {
    for (const snug::Bytes budget : {snug::Bytes::unlimited(), subject.budget}) {
      if (named(subject)) {
        in_a_process([&] { long_run(subject, budget, steps); });
      }
    }
  }
  return 0;
}
