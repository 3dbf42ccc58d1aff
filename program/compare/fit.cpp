// The fit experiment: the largest GPT that trains in a number of bytes, technique by technique; and a single sequence
// that is too long for the bytes.

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/compare/experiment.h"
#include "program/measure/deep_models.h"
#include "program/measure/gpt_training.h"
#include "program/measure/measure.h"
#include "program/measure/plans.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace snug::cli {

using namespace measure;

namespace {

using at::Tensor;

// Each way has everything of the way before, and one technique more. Exception: the last way frees gradients as soon as
// the gradients are used, and so has no micro-batches.
constexpr std::array kLadder{
    GptWay{.name = "plain LibTorch"},
    GptWay{.name = "+ micro-batches of 1", .splits = true},
    GptWay{.name = "+ checkpointed blocks", .splits = true, .checkpoints = true},
    GptWay{.name = "+ 8-bit AdamW", .splits = true, .checkpoints = true, .eight_bits = true},
    GptWay{.name = "updates in backward, not micro-batches",
           .checkpoints = true,
           .eight_bits = true,
           .updates_in_backward = true},
};

// 8-bit AdamW is for the CPU. On other devices the line of 8-bit AdamW is left out, and the last way has AdamW.
std::vector<GptWay> ladder_on(c10::Device device) {
  std::vector<GptWay> ways(kLadder.begin(), kLadder.end());
  if (!device.is_cpu()) {
    std::erase_if(ways, [](const GptWay& way) { return way.eight_bits && !way.updates_in_backward; });
    ways.back().eight_bits = false;
  }
  return ways;
}

void ladder(Section& section, const GptSizes& sizes) {
  Bars sizes_bars{.quantity = Quantity::Count, .parts = {"number of parameters"}};
  Bars memory{.quantity = Quantity::Bytes,
              .parts = {"parameters", "gradients", "optimizer state", "activations", "workspace"}};
  Table table{.header = {"technique", "width", "parameters", "against plain", "tokens/s"}};
  int64_t width = sizes.width_unit;
  double plain = 0, most = 0;
  for (const GptWay& way : ladder_on(sizes.device)) {
    width = widest_gpt(way, sizes, width);
    fmt::print("{}: {} wide\n", way.name, width);
    const GptMeasured result = measure_gpt(way, sizes, width);
    const auto parameters = static_cast<double>(result.parameters);
    plain = plain == 0 ? parameters : plain;
    most = parameters;
    sizes_bars.bars.push_back({way.name,
                               {parameters},
                               fmt::format("{:.1f} x, {:.0f} tokens/s", parameters / plain, result.tokens_per_second)});
    const MemoryMeter::Report& held = result.memory;
    const auto number = [](int64_t bytes) { return static_cast<double>(bytes); };
    memory.bars.push_back({way.name,
                           {number(held.parameters), number(held.gradients), number(held.optimizer_state),
                            number(held.activations), number(held.workspace + held.outputs)},
                           ""});
    table.rows.push_back({way.name, fmt::format("{}", width), fmt::format("{:.1f} M", parameters / 1e6),
                          fmt::format("{:.2f} x", parameters / plain),
                          fmt::format("{:.0f}", result.tokens_per_second)});
  }
  section.numbers = {{"Plain LibTorch", fmt::format("{:.1f} M", plain / 1e6), "parameters, the most that train"},
                     {"snug", fmt::format("{:.1f} M", most / 1e6), "in the same bytes"},
                     {"That is", fmt::format("{:.1f} x", most / plain), "the model"}};
  section.findings.push_back(
      fmt::format("In {} a GPT of {:.1f} M parameters trains with plain LibTorch, and one of {:.1f} M with snug; the "
                  "batch is the same.",
                  bytes_text(sizes.limit), plain / 1e6, most / 1e6));
  const std::string made = fmt::format(
      "GPTs of {} blocks, {} sequences of {} tokens a step, FP32; found by trying widths in steps of {} under a "
      "MemoryLimit of {}.",
      sizes.layers, sizes.batch, sizes.context, sizes.width_unit, bytes_text(sizes.limit));
  section.exhibits.push_back(
      {.file = "fit-parameters",
       .title = "The largest GPT that trains",
       .caption = fmt::format("within {} of tensors; each line but the last adds a technique", bytes_text(sizes.limit)),
       .made = made,
       .content = sizes_bars});
  section.exhibits.push_back({.file = "fit-memory",
                              .title = "What holds the memory at the peak",
                              .caption = "of the largest GPT in each line",
                              .made = made,
                              .content = memory});
  section.exhibits.push_back(
      {.file = "fit-table", .title = "In numbers", .made = made + " Tokens/s of one step.", .content = table});
}

// A limit between the bytes of every block checkpointed and the least bytes of a plan, above the weights.
int64_t limit_for_plans_alone(const plan::Profile& profile, int64_t every_block) {
  const int64_t least = least_bytes_of_plan(profile);
  return (least + std::max(least, every_block)) / 2;
}

// One sequence cannot be split.
void long_sequence(Section& section, const CompareFlags& flags) {
  const DeepModel model = on_device(flags.quick ? deep_gpt(6, 128, 1024, 1) : deep_gpt(12, 256, 2048, 1), flags.device);
  const std::vector<Tensor> parameters = model.parameters();
  const Tensor input = model.input(1);
  const std::vector<Technique> techniques = techniques_for(model);
  const auto plain = [&] { return forward_under(techniques[0], model, input); };
  const auto checkpointed = [&] { return forward_under(every_layer(techniques), model, input); };
  const auto peak_of = [&](const std::function<Tensor()>& forward) {
    return bytes_of_step(parameters, [&] { forward().backward(); }).peak;
  };
  const int64_t needed = peak_of(plain);
  const std::vector<Tensor> expected = gradients_of(parameters);
  const int64_t every_block = peak_of(checkpointed);
  drop_gradients(parameters);
  const plan::Profile profile = detail::profile_step(plain);
  const int64_t budget = limit_for_plans_alone(profile, every_block);
  const ActivationPlan plan = detail::plan_activations(profile, plain, Bytes(budget));
  drop_gradients(parameters);
  const int64_t before = live_bytes(flags.device).count();
  Table table{.header = {"way", "peak of forward and backward", "in the limit", "gradients against plain"}};
  const auto row = [&](const std::string& name, const std::function<Tensor()>& forward) {
    const int64_t peak = peak_of(forward);
    drop_gradients(parameters);
    const bool ran = fits(flags.device, before + budget, [&] { forward().backward(); });
    const bool same = ran && same_bits(gradients_of(parameters), expected);
    table.rows.push_back({name, bytes_text(peak), ran ? "trains" : "runs out of memory",
                          !ran   ? ""
                          : same ? "equal to the bit"
                                 : "not equal"});
    return ran;
  };
  const bool plain_ran = row("plain", plain);
  const bool checkpointed_ran = row("every block checkpointed", checkpointed);
  const bool plan_ran = row("automatic plan", under_plan(plain, plan));
  const auto in_words = [](bool ran) { return ran ? "trains" : "runs out of memory"; };
  section.findings.push_back(fmt::format(
      "One sequence of a {}: plain training needs {} above the weights. Under {} it {}, with every block checkpointed "
      "it {}, and under a plan it {}.",
      model.what, bytes_text(needed), bytes_text(budget), in_words(plain_ran), in_words(checkpointed_ran),
      in_words(plan_ran)));
  section.exhibits.push_back(
      {.file = "fit-sequence",
       .title = "A single sequence that is too long",
       .caption = fmt::format("limit: {} above the weights, gradients included", bytes_text(budget)),
       .made = model.what + ", batch 1: there is nothing to split. The limit lies between the least that a plan can do "
                            "with and, if that is more, what every block checkpointed takes.",
       .content = table});
}

// Three steps of a GPT of 151 M parameters in a limit in which plain LibTorch runs out of memory: by 8-bit AdamW, and
// so on the CPU.
void large_gpt(Section& section) {
  const GptSizes sizes{.limit = int64_t{2} << 30, .layers = 12, .context = 256, .batch = 2};
  constexpr int64_t kWidth = 1024;
  const bool plain_fits = gpt_trains(kLadder[0], sizes, kWidth);
  const MemoryLimit limit(sizes.device, Bytes(sizes.limit));
  GptTraining training(kLadder[3], sizes, kWidth);
  const Tensor tokens = gpt_tokens(sizes, sizes.batch, sizes.context);
  std::string losses;
  for (int step = 0; step < 3; ++step) {
    losses += fmt::format("{}{:.3f}", step == 0 ? "" : ", ", training.step(tokens));
  }
  section.findings.push_back(fmt::format(
      "A GPT of 12 blocks, {} wide (151 M parameters), does three steps under {}: losses {}. Plain LibTorch {} there.",
      kWidth, bytes_text(sizes.limit), losses, plain_fits ? "trains, too," : "runs out of memory"));
}

}  // namespace

Section compare_fit(const CompareFlags& flags) {
  Section section{.name = "fit",
                  .title = "All together: what fits",
                  .idea =
                      "A number of bytes, and the largest model that trains within it, as one technique after the "
                      "other is added; and what no micro-batch can help: one sample that does not fit."};
  const GptSizes sizes =
      flags.quick
          ? GptSizes{.device = flags.device, .limit = int64_t{200} << 20, .layers = 6, .context = 128, .batch = 8}
          : GptSizes{.device = flags.device, .limit = int64_t{1} << 30, .layers = 12, .context = 256, .batch = 8};
  ladder(section, sizes);
  long_sequence(section, flags);
  if (!flags.device.is_cpu()) {
    section.findings.emplace_back(
        "8-bit AdamW is for the CPU: the line that adds it and the GPT of 151 M parameters are left out, and updates in backward are AdamW's.");
  } else if (!flags.quick) {
    large_gpt(section);
  }
  return section;
}

}  // namespace snug::cli
