// snug plan: what a training step takes in bytes and time under every budget, before anything is trained.

#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/nn/functional/loss.h>

#include "cli/command.h"
#include "snug/activations/rematerialize.h"
#include "snug/core/error.h"
#include "snug/models/gpt.h"
#include "snug/planner/curve.h"
#include "snug/planner/step_search.h"

namespace snug::cli {
namespace {

struct Flags {
  std::string model = "gpt-tiny", memory;
  int64_t batch = 64;
  bool explain = false;
};

// Of random text: neither bytes nor time depend on the words.
StepProfile profile_of(Gpt& model, const GptOptions& options, int64_t sequences) {
  const at::Tensor tokens = at::randint(options.vocab, {sequences, options.context}, at::kLong);
  return profile_step([&] {
    const at::Tensor logits = model->forward(tokens);
    return torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(-1)}), tokens.reshape({-1}));
  });
}

int64_t bytes_of(const Gpt& model) {
  int64_t bytes = 0;
  for (const at::Tensor& parameter : model->parameters()) {
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  return bytes;
}

void print_curve(const StepProfile& profile, const Flags& flags, int64_t fixed) {
  const PlanCurve curve = plan_curve(StepSimulator(profile));
  fmt::print(
      "{}, {} sequences at once, FP32, AdamW: {} of parameters and optimizer state, and during forward and "
      "backward\n\n{}\n",
      flags.model, flags.batch, Bytes(fixed).str(), curve.table());
  constexpr int64_t kKiB = 1024;
  fmt::print("In all at least {}KiB; snug plan --memory also looks for smaller micro-batches.\n",
             (fixed + curve.smallest_feasible_bytes() + kKiB - 1) / kKiB);
  if (flags.explain) {
    fmt::print("\nThe most frugal plan:\n{}", explain(StepSimulator(profile), curve.points.back()));
  }
}

void print_choice(Gpt& model, const GptOptions& options, const Flags& flags, int64_t parameters) {
  const Bytes budget = Bytes::parse(flags.memory);
  std::vector<std::unique_ptr<StepSimulator>> simulators;
  std::vector<MicroBatchCandidate> candidates;
  for (int64_t items = flags.batch; items >= 1; items /= 2) {
    simulators.push_back(std::make_unique<StepSimulator>(profile_of(model, options, items)));
    candidates.push_back({.items = items, .simulator = simulators.back().get()});
  }
  const StepSearch found = search_step(
      candidates,
      {.batch = flags.batch, .budget = budget.count(), .fixed_bytes = 3 * parameters, .gradient_bytes = parameters});
  fmt::print("{}", found.explain());
  if (!found.choice) {
    throw BudgetExceeded(fmt::format("plan: {} does not fit into {}; {} would do", flags.model, budget.str(),
                                     Bytes(found.smallest_feasible_bytes).str()),
                         Bytes(found.smallest_feasible_bytes));
  }
  if (flags.explain) {
    for (const MicroBatchCandidate& candidate : candidates) {
      if (candidate.items == found.choice->items) {
        fmt::print("\n{}", explain(*candidate.simulator, found.choice->plan));
      }
    }
  }
}

void run_plan(const Flags& flags) {
  if (flags.batch < 1) {
    throw ConfigError(fmt::format("plan: --batch is {}; give a number of sequences >= 1", flags.batch));
  }
  const GptOptions options = gpt_configuration(flags.model);
  Gpt model(options);
  const int64_t parameters = bytes_of(model);
  if (flags.memory.empty()) {
    print_curve(profile_of(model, options, flags.batch), flags, 3 * parameters);  // weights and AdamW's two moments
  } else {
    print_choice(model, options, flags, parameters);
  }
}

}  // namespace

void add_plan(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "Show what a training step takes under every budget");
  const auto flags = std::make_shared<Flags>();
  command->add_option("--model", flags->model, "As for snug train")->type_name("NAME")->capture_default_str();
  command->add_option("--batch", flags->batch, "Sequences in a step")->type_name("N")->capture_default_str();
  command->add_option("--memory", flags->memory, "A budget, such as 300MiB: the fastest step that fits")
      ->type_name("BYTES");
  command->add_flag("--explain", flags->explain, "What is alive at the peak, and what is rebuilt");
  command->footer(
      "Runs steps on random text on the CPU, with everything kept: plain training must fit into the machine.");
  command->callback([flags] { run_plan(*flags); });
}

}  // namespace snug::cli
