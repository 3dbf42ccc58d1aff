#include <algorithm>
#include <map>
#include <utility>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "program/models/gpt.h"
#include "snug/adamw.h"
#include "snug/memory.h"
#include "snug/stepper.h"
#include "tests/support/process_figures.h"
#include "tests/support/temporary_folder.h"

// Hundreds of steps of shapes that change leave nothing behind: no bytes of tensors, no open file, no thread.
// benchmarks/long_run.cpp makes thousands of steps and looks at resident memory, too.

namespace snug::long_run_test {
namespace {

using testing::process_figures;
using testing::ProcessFigures;
using testing::TemporaryFolder;

struct Outcome {
  int64_t most_bytes = 0;  // the highest peak of a step
  int64_t planned = 0;     // steps that were cut or recomputed
};

// Each of 12 shapes has its turn: the first 60 steps warm up, and the figures after each later one are those of then.
Outcome make_300_steps(const StepperOptions& options) {
  torch::manual_seed(1);
  Gpt model(GptOptions{.vocab = 64, .context = 32, .layers = 2, .heads = 2, .width = 32});
  AdamW optimizer(model->parameters(), {.lr = 1e-3});
  Stepper stepper(model, optimizer, options);
  std::map<std::pair<int64_t, int64_t>, int64_t> live;  // after the last step of a shape
  ProcessFigures warm;
  Outcome outcome;
  for (int64_t step = 0; step < 300; ++step) {
    const int64_t items = 2 + 2 * (step % 4), size = 8 + 12 * (step % 3);
    const auto result = stepper.step(
        Batch{torch::randint(64, {items, size}), torch::randint(64, {items, size})}, [&](const Batch& micro) {
          return Loss::mean(
              torch::nn::functional::cross_entropy(model->forward(micro[0]).flatten(0, 1), micro[1].flatten()),
              micro[1].numel());
        });
    outcome.most_bytes = std::max(outcome.most_bytes, result.peak_bytes);
    outcome.planned += stepper.plan() && (stepper.plan()->activations || result.micro_batches > 1) ? 1 : 0;
    const ProcessFigures now = process_figures();
    const int64_t alive = live_bytes(torch::kCPU).count();
    if (step < 60) {
      warm = now;
      live[{items, size}] = alive;
      continue;
    }
    EXPECT_EQ(live.at({items, size}), alive) << "step " << step;
    EXPECT_EQ(warm.open_files, now.open_files) << "step " << step;
    EXPECT_EQ(warm.threads, now.threads) << "step " << step;
    if (::testing::Test::HasFailure()) {
      return outcome;
    }
  }
  EXPECT_EQ(live.size(), 12u);
  return outcome;
}

TEST(LongRun, LeavesNoBytesFilesOrThreadsBehindWithoutABudgetAndWithOne) {
  const TemporaryFolder folder;
  const int64_t before = live_bytes(torch::kCPU).count();
  const Outcome plain = make_300_steps({});
  const Outcome planned =
      make_300_steps({.budget = {.memory = Bytes(plain.most_bytes * 3 / 4), .offload = folder.path()}});
  EXPECT_LE(planned.most_bytes, plain.most_bytes * 3 / 4);
  EXPECT_GT(planned.planned, 0);
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
}

}  // namespace
}  // namespace snug::long_run_test
