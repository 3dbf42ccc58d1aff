// The checkpointing experiment: bytes and time of a training step of deep networks, for each technique that keeps fewer
// activations.

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/compare/experiment.h"
#include "program/compare/schedule.h"
#include "program/measure/deep_models.h"
#include "program/measure/measure.h"
#include "program/measure/plans.h"
#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "snug/plan.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace snug::cli {

using namespace measure;

namespace {

using at::Tensor;

// A technique for a step: the forward pass, and the results.
struct Contender {
  std::string family, label;
  std::function<Tensor()> forward;
  bool is_same_network = true;
  MemoryMeter::Report memory = {};  // of a step with AdamW
  int64_t activations = 0;  // peak of forward and backward above the level before, less the bytes of all gradients
  Spread time = {};         // of a forward and backward pass, plain = 1
  bool has_same_bits = false;

  std::string title() const { return label.empty() ? family : family + ", " + label; }
  // Only checkpoint_sequential comes in several forms.
  std::string short_title() const { return family == "checkpoint_sequential" ? label : family; }
  int64_t total() const {
    return memory.parameters + memory.gradients + memory.optimizer_state + memory.activations + memory.workspace +
           memory.outputs;
  }
};

// A quick search nearly always finds an equally fast plan.
ActivationPlan plan_within(const plan::Profile& profile, Bytes budget, const CompareFlags& flags) {
  if (flags.quick) {
    try {
      return detail::unverified_plan(profile, budget, {.work = 2'000'000});
    } catch (const BudgetExceeded&) {  // the long search follows
    }
  }
  return detail::unverified_plan(profile, budget);
}

// Automatic plans for half and a quarter of plain training's activations, for the fewest possible activations, and for
// the bytes of each technique by hand. With equal bytes, only time tells plan and technique apart.
void add_automatic(std::vector<Contender>& contenders, const DeepModel& model, const CompareFlags& flags) {
  const std::function<Tensor()> plain_forward = contenders.front().forward;
  const int64_t gradients = bytes_of(model.parameters());
  drop_gradients(model.parameters());
  const plan::Profile profile = detail::profile_step(plain_forward);
  const int64_t least = least_bytes_of_plan(profile);
  const int64_t plain = contenders.front().activations;
  std::map<int64_t, std::string> budgets{{plain / 2, "half"}, {plain / 4, "a quarter"}};
  for (const Contender& contender : contenders) {
    if (contender.is_same_network && contender.activations < plain) {
      budgets.emplace(contender.activations, "as " + contender.short_title());
    }
  }
  std::erase_if(budgets, [&](const auto& budget) { return budget.first + gradients <= least; });
  budgets.emplace(least - gradients, "least");
  for (const auto& [bytes, label] : budgets) {
    const ActivationPlan plan = plan_within(profile, Bytes(bytes + gradients), flags);
    contenders.push_back({.family = "automatic", .label = label, .forward = under_plan(plain_forward, plan)});
  }
}

// A plan that may offload, for the bytes of the technique by hand that offloads. No plan if a plan needs more bytes.
void add_automatic_with_offload(std::vector<Contender>& contenders, const DeepModel& model, const CompareFlags& flags) {
  const auto by_hand =
      std::find_if(contenders.begin(), contenders.end(), [](const Contender& c) { return c.family == "offload"; });
  const Bytes budget(by_hand->activations + bytes_of(model.parameters()));
  drop_gradients(model.parameters());
  const plan::Profile profile =
      detail::profile_step(contenders.front().forward, {.link = measure_offload_link({}, flags.device)});
  try {
    const ActivationPlan plan = plan_within(profile, budget, flags);
    contenders.push_back({.family = "automatic",
                          .label = flags.device.is_cpu() ? "as offload, with a file" : "as offload, with host memory",
                          .forward = under_plan(contenders.front().forward, plan)});
  } catch (const BudgetExceeded& error) {
    fmt::print("{}\n", error.what());
  }
}

std::vector<Tensor> gradients_after(const Contender& contender, const std::vector<Tensor>& parameters) {
  drop_gradients(parameters);
  contender.forward().backward();
  return gradients_of(parameters);
}

std::vector<Contender> measured(const DeepModel& model, const CompareFlags& flags) {
  const std::vector<Tensor> parameters = model.parameters();
  const Tensor input = model.input(model.batch);
  std::vector<Contender> contenders;
  for (const Technique& technique : techniques_for(model)) {
    contenders.push_back({.family = technique.name,
                          .label = technique.label,
                          .forward = [&model, input, technique] { return forward_under(technique, model, input); },
                          .is_same_network = technique.is_same_network});
  }
  const auto measure_activations = [&](Contender& contender) {
    contender.activations = bytes_of_step(parameters, [&] { contender.forward().backward(); }).activations;
  };
  std::for_each(contenders.begin(), contenders.end(), measure_activations);
  add_automatic(contenders, model, flags);
  add_automatic_with_offload(contenders, model, flags);
  AdamW optimizer(parameters, {.lr = 0});  // learning rate 0, so that all contenders have the same weights
  const std::vector<Tensor> expected = gradients_after(contenders.front(), parameters);
  optimizer.step();  // makes the optimizer's state
  std::vector<std::function<double()>> programs;
  for (Contender& contender : contenders) {
    contender.has_same_bits = same_bits(gradients_after(contender, parameters), expected);
    measure_activations(contender);
    drop_gradients(parameters);
    MemoryMeter meter(flags.device);
    meter.attach(*model.module);
    meter.attach(optimizer);
    contender.forward().backward();
    optimizer.step();
    contender.memory = meter.report();
    programs.emplace_back([&contender, &parameters, device = flags.device] {
      drop_gradients(parameters);
      return seconds_of(device, [&] { contender.forward().backward(); });
    });
  }
  const Turns turns = take_turns(programs, flags.turns(7));
  for (size_t i = 0; i < contenders.size(); ++i) {
    contenders[i].time = turns.ratio(i);
  }
  return contenders;
}

double share(int64_t part, int64_t whole) { return static_cast<double>(part) / static_cast<double>(whole); }

Exhibit time_over_memory(const DeepModel& model, const std::vector<Contender>& contenders, const std::string& made) {
  Plot plot{.x = {.title = "activation peak", .quantity = Quantity::Bytes, .from_zero = true},
            .y = {.title = "time of a step, plain = 1"}};
  for (const Contender& contender : contenders) {
    auto curve = std::find_if(plot.curves.begin(), plot.curves.end(),
                              [&](const Curve& c) { return c.name == contender.family; });
    if (curve == plot.curves.end()) {
      // The automatic plans come last, and first in the figure, because the figure shows the plans as one line.
      const bool is_automatic = contender.family == "automatic";
      curve = plot.curves.insert(
          is_automatic ? plot.curves.begin() : plot.curves.end(),
          {.name = contender.family, .x = {}, .y = {}, .drawn = is_automatic ? Drawn::LineAndPoints : Drawn::Points});
    }
    curve->x.push_back(static_cast<double>(contender.activations));
    curve->y.push_back(contender.time.median);
    curve->labels.push_back(contender.label.empty() ? contender.family : contender.label);
  }
  return {.file = "checkpointing-" + model.name,
          .title = "Time over memory",
          .caption = model.what + "; further left and lower is better",
          .made = made,
          .content = plot};
}

Exhibit memory_bars(const DeepModel& model, const std::vector<Contender>& contenders) {
  Bars bars{.quantity = Quantity::Bytes,
            .parts = {"parameters", "gradients", "optimizer state", "activations", "workspace"}};
  for (const Contender& contender : contenders) {
    const MemoryMeter::Report& memory = contender.memory;
    const auto number = [](int64_t bytes) { return static_cast<double>(bytes); };
    bars.bars.push_back({contender.title(),
                         {number(memory.parameters), number(memory.gradients), number(memory.optimizer_state),
                          number(memory.activations), number(memory.workspace + memory.outputs)},
                         fmt::format("{:+.0f} %", 100 * (share(contender.total(), contenders.front().total()) - 1))});
  }
  return {
      .file = fmt::format("checkpointing-{}-memory", model.name),
      .title = "What holds the memory at the peak",
      .caption = model.what + ", one step with AdamW; behind each bar the change against plain",
      .made = fmt::format("Batch {}, FP32; counted by the allocator at the moment of the peak. (The activation peak of "
                          "the table is how far memory rises in forward and backward, less all gradients.)",
                          model.batch),
      .content = bars};
}

Exhibit numbers(const DeepModel& model, const std::vector<Contender>& contenders, const std::string& made) {
  Table table{
      .header = {"way", "activation peak", "of plain's", "total peak", "of plain's", "time, plain = 1", "gradients"}};
  const Contender& plain = contenders.front();
  for (const Contender& contender : contenders) {
    table.rows.push_back({contender.title(), bytes_text(contender.activations),
                          percent(share(contender.activations, plain.activations)), bytes_text(contender.total()),
                          percent(share(contender.total(), plain.total())), str(contender.time),
                          !contender.is_same_network ? "another network"
                          : contender.has_same_bits  ? "same bits"
                                                     : "not equal"});
  }
  return {.file = fmt::format("checkpointing-{}-table", model.name),
          .title = "In numbers",
          .caption = model.what,
          .made = made,
          .content = table};
}

// peak = intercept + slope * items, by least squares.
struct Line {
  double intercept = 0, slope = 0;
};

Line fitted(const std::vector<double>& x, const std::vector<double>& y) {
  const auto n = static_cast<double>(x.size());
  double sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    sx += x[i];
    sy += y[i];
    sxx += x[i] * x[i];
    sxy += x[i] * y[i];
  }
  const double slope = (n * sxy - sx * sy) / (n * sxx - sx * sx);
  return {(sy - slope * sx) / n, slope};
}

int64_t peak_at(const DeepModel& model, const Technique& technique, int64_t items) {
  const Tensor input = model.input(items);
  return bytes_of_step(model.parameters(), [&] { forward_under(technique, model, input).backward(); }).peak;
}

// Peak over batch size, plain and with every layer checkpointed; and the batch that fits with every layer checkpointed
// into the bytes of plain training.
Exhibit peak_over_batch(Section& section, const DeepModel& model) {
  const std::vector<Technique> techniques = techniques_for(model);
  Plot plot{.x = {.title = "batch", .from_zero = true},
            .y = {.title = "peak of forward and backward", .quantity = Quantity::Bytes, .from_zero = true},
            .wide = false};
  std::vector<Line> lines;
  for (const Technique* technique : {&techniques.front(), &every_layer(techniques)}) {
    Curve curve{.name = technique->title(), .x = {}, .y = {}, .drawn = Drawn::LineAndPoints};
    for (int64_t step = 1; step <= 4; ++step) {
      const int64_t items = std::max<int64_t>(1, model.batch * step / 4);
      curve.x.push_back(static_cast<double>(items));
      curve.y.push_back(static_cast<double>(peak_at(model, *technique, items)));
    }
    lines.push_back(fitted(curve.x, curve.y));
    plot.curves.push_back(std::move(curve));
  }
  const auto budget = static_cast<int64_t>(plot.curves[0].y.back());
  const int64_t larger = largest(model.batch * 64, [&](int64_t items) {
    return lines[1].intercept + lines[1].slope * static_cast<double>(items) <= static_cast<double>(budget) &&
           (items <= model.batch || peak_at(model, every_layer(techniques), items) <= budget);
  });
  section.findings.push_back(
      fmt::format("{}: an item takes {} plain and {} with every layer checkpointed; in the {} that plain training "
                  "needs for a batch of {}, a batch of {} fits then.",
                  model.what, bytes_text(std::llround(lines[0].slope)), bytes_text(std::llround(lines[1].slope)),
                  bytes_text(budget), model.batch, larger));
  std::string made = "Measured; least squares:";
  for (size_t i = 0; i < lines.size(); ++i) {
    made += fmt::format("{} {} + {} an item", i == 0 ? "" : ";", bytes_text(std::llround(lines[i].intercept)),
                        bytes_text(std::llround(lines[i].slope)));
  }
  return {.file = fmt::format("checkpointing-{}-batch", model.name),
          .title = "Peak over batch",
          .caption = model.what,
          .made = made + ".",
          .content = plot};
}

// Each technique for a GPT of more and more blocks.
Exhibit peak_over_depth(const CompareFlags& flags) {
  constexpr int64_t kWidth = 128, kContext = 128, kBatch = 2;
  Plot plot{.x = {.title = "blocks", .log_base = 2},
            .y = {.title = "activation peak", .quantity = Quantity::Bytes, .log_base = 2}};
  for (const int64_t depth : flags.quick ? std::vector<int64_t>{9, 12} : std::vector<int64_t>{9, 12, 24, 48, 96}) {
    const DeepModel model = on_device(deep_gpt(depth, kWidth, kContext, kBatch), flags.device);
    const Tensor input = model.input(model.batch);
    const std::vector<Technique> techniques = techniques_for(model);
    plot.curves.resize(techniques.size());
    for (size_t i = 0; i < techniques.size(); ++i) {
      const std::string title = techniques[i].title();
      Curve& curve = plot.curves[i];
      curve.name = title.substr(0, title.find(" = "));  // "sqrt(n) = 3 segments": the number depends on the depth
      curve.drawn = Drawn::LineAndPoints;
      curve.x.push_back(static_cast<double>(depth));
      curve.y.push_back(static_cast<double>(bytes_of_step(model.parameters(), [&] {
                                              forward_under(techniques[i], model, input).backward();
                                            }).activations));
    }
  }
  return {
      .file = "checkpointing-depth",
      .title = "Activation peak over depth",
      .caption = "both axes logarithmic",
      .made = fmt::format("A GPT {} wide, {} x {} tokens, FP32; counted by the allocator.", kWidth, kBatch, kContext),
      .content = plot};
}

// Compares the automatic plans with the techniques by hand that give the same gradients and take fewer bytes than plain
// training: does a plan take neither more bytes nor more time?
std::string verdict(const DeepModel& model, const std::vector<Contender>& contenders) {
  std::string beaten, others;
  for (const Contender& rival : contenders) {
    const bool saves = rival.activations < contenders.front().activations;
    if (!saves || rival.family == "automatic" || !rival.is_same_network) {
      continue;
    }
    const bool is_beaten = std::any_of(contenders.begin(), contenders.end(), [&](const Contender& plan) {
      return plan.family == "automatic" && plan.activations <= rival.activations &&
             plan.time.median <= rival.time.median;
    });
    std::string& list = is_beaten ? beaten : others;
    list += (list.empty() ? "" : "; ") + rival.short_title();
  }
  const Contender& least =
      *std::find_if(contenders.begin(), contenders.end(), [](const Contender& c) { return c.label == "least"; });
  return fmt::format(
      "{}: the most frugal plan takes {} of plain's activations for {:.2f} of its time. Ways by hand that a plan beats "
      "or equals in both bytes and time: {}.{}",
      model.what, percent(share(least.activations, contenders.front().activations)), least.time.median,
      beaten.empty() ? "none" : beaten, others.empty() ? "" : " Not beaten in time: " + others + ".");
}

}  // namespace

Section compare_checkpointing(const CompareFlags& flags) {
  Section section{
      .name = "checkpointing",
      .title = "Checkpointing: memory for time",
      .idea =
          "What forward saves for backward is most of the memory of deep networks. Each way keeps less of it "
          "and computes the rest again, or puts it elsewhere. Articles report 50 to 60 % less memory for 15 "
          "to 25 % more time."};
  std::vector<DeepModel> models;
  if (flags.quick) {
    models = {deep_gpt(8, 128, 128, 4), deep_mlp(16, 256, 256), deep_resnet(14, 8)};
  } else {
    models = {deep_gpt(12, 256, 256, 4), deep_mlp(32, 512, 512), deep_resnet(20, 32)};
  }
  const Schedule schedule = recorded_schedule(flags.device);
  section.findings.push_back(schedule_finding(schedule));
  section.exhibits.push_back(schedule_exhibit(schedule));
  std::vector<Exhibit> batches;
  for (const DeepModel& on_cpu : models) {
    const DeepModel model = on_device(on_cpu, flags.device);
    fmt::print("{}, batch {}\n", model.what, model.batch);
    const std::vector<Contender> contenders = measured(model, flags);
    const std::string made = fmt::format(
        "Batch {}, FP32, forward and backward; all ways in {} turns, medians. Activation peak: rise above the level "
        "before the step, less the gradients.",
        model.batch, flags.turns(7));
    section.findings.push_back(verdict(model, contenders));
    section.exhibits.push_back(time_over_memory(model, contenders, made));
    section.exhibits.push_back(memory_bars(model, contenders));
    section.exhibits.push_back(numbers(model, contenders, made));
    batches.push_back(peak_over_batch(section, model));
    if (section.numbers.empty()) {
      const Contender& least =
          *std::find_if(contenders.begin(), contenders.end(), [](const Contender& c) { return c.label == "least"; });
      section.numbers = {
          {"Activations, least plan", percent(share(least.activations, contenders.front().activations)), "of plain's"},
          {"Its time", fmt::format("{:.2f} x", least.time.median), "of plain's"}};
    }
  }
  section.exhibits.insert(section.exhibits.end(), batches.begin(), batches.end());
  section.exhibits.push_back(peak_over_depth(flags));
  return section;
}

}  // namespace snug::cli
