// The precision experiment: the uses of bytes in training, in FP32, with autocast, and with 16-bit weights and FP32
// masters.

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/compare/experiment.h"
#include "program/measure/measure.h"
#include "program/measure/two_tasks.h"
#include "program/run/device.h"
#include "snug/memory.h"
#include "snug/stepper.h"

namespace snug::cli {

using namespace measure;

namespace {

using at::Tensor;

int64_t network_width(bool quick) { return quick ? 200 : 600; }
constexpr size_t kShownBatch = 3;  // index of the measured batch in figures of a single batch

struct Recipe {
  const char* name;
  Precision precision;
  Weights weights;
  int64_t micro_batch;  // 0: the batch at once
};

constexpr std::array kRecipes{
    Recipe{"FP32", Precision::Float32, Weights::Full, 0},
    Recipe{"autocast to BF16", Precision::BFloat16, Weights::Full, 0},
    Recipe{"BF16 weights, FP32 masters", Precision::BFloat16, Weights::Low, 0},
};

// A network that learns sine and cosine under a recipe.
struct Run {
  TwoTasks model;
  std::unique_ptr<torch::optim::AdamW> adam;
  std::unique_ptr<Stepper> stepper;

  Run(const Recipe& recipe, const CompareFlags& flags) : model(network_width(flags.quick)) {
    if (recipe.weights == Weights::Low) {
      model->to(torch::kBFloat16);
    }
    move_to(*model, flags.device);
    adam = std::make_unique<torch::optim::AdamW>(model->parameters());
    stepper = std::make_unique<Stepper>(
        model, *adam,
        StepperOptions{.precision = recipe.precision, .weights = recipe.weights, .micro_batch = recipe.micro_batch});
  }

  StepResult step(const TwoTasksData& data) {
    return stepper->step({data.x, data.y}, [&](const Batch& micro) {
      return Loss::mean(two_tasks_loss(model->forward(micro[0]), micro[1]), micro.size());
    });
  }
};

// Bytes between two steps, for any batch size.
struct StaticBytes {
  int64_t weights = 0, masters = 0, gradients = 0, optimizer = 0;
  int64_t total() const { return weights + masters + gradients + optimizer; }
};

int64_t gradient_bytes(const std::vector<Tensor>& parameters) {
  int64_t bytes = 0;
  for (const Tensor& parameter : parameters) {
    bytes += parameter.grad().defined() ? static_cast<int64_t>(parameter.grad().nbytes()) : 0;
  }
  return bytes;
}

// Call static_bytes after a step.
StaticBytes static_bytes(const Run& run, const Recipe& recipe) {
  const std::vector<Tensor> weights = run.model->parameters();
  StaticBytes bytes{.weights = bytes_of(weights), .gradients = gradient_bytes(weights)};
  for (const auto& [name, master] : run.stepper->full_precision_parameters()) {
    if (recipe.weights == Weights::Low) {
      bytes.masters += static_cast<int64_t>(master.nbytes());
      bytes.gradients += gradient_bytes({master});
    }
    bytes.optimizer += 2 * 4 * master.numel();  // AdamW's two moments, FP32
  }
  return bytes;
}

struct Measured {
  const Recipe* recipe;
  StaticBytes fixed;
  std::vector<double> dynamic;  // of each batch size
};

Measured measure_recipe(const Recipe& recipe, const std::vector<int64_t>& batches, const CompareFlags& flags) {
  Measured measured{.recipe = &recipe, .fixed = {}, .dynamic = {}};
  Run run(recipe, flags);
  run.step(two_tasks_data(16, flags.device));
  measured.fixed = static_bytes(run, recipe);
  for (const int64_t batch : batches) {
    measured.dynamic.push_back(
        static_cast<double>(run.step(two_tasks_data(batch, flags.device)).activation_peak_bytes));
  }
  return measured;
}

Exhibit dynamic_figure(const std::vector<Measured>& all, const std::vector<int64_t>& batches,
                       const CompareFlags& flags) {
  Plot plot{.x = {.title = "batch", .log_base = 2},
            .y = {.title = "dynamic bytes", .quantity = Quantity::Bytes, .log_base = 2}};
  const std::vector<double> x(batches.begin(), batches.end());
  for (const Measured& measured : all) {
    plot.curves.push_back(
        {.name = measured.recipe->name, .x = x, .y = measured.dynamic, .drawn = Drawn::LineAndPoints});
  }
  plot.curves.push_back({.name = "static bytes, FP32",
                         .x = {x.front(), x.back()},
                         .y = std::vector<double>(2, static_cast<double>(all.front().fixed.total()))});
  return {.file = "precision-dynamic",
          .title = "Dynamic bytes over batch",
          .caption = "rise of memory in forward and backward, less the gradients",
          .made = fmt::format("The network of sin-cos, {} wide; counted by the allocator.", network_width(flags.quick)),
          .content = plot};
}

Exhibit bytes_figure(const std::vector<Measured>& all, const std::vector<int64_t>& batches, size_t which,
                     const CompareFlags& flags) {
  Bars bars{.quantity = Quantity::Bytes,
            .parts = {"parameters", "masters", "gradients", "optimizer state", "activations"}};
  const auto number = [](int64_t bytes) { return static_cast<double>(bytes); };
  const auto total = [&](const Measured& m) { return number(m.fixed.total()) + m.dynamic[which]; };
  for (const Measured& measured : all) {
    const StaticBytes& fixed = measured.fixed;
    bars.bars.push_back({measured.recipe->name,
                         {number(fixed.weights), number(fixed.masters), number(fixed.gradients),
                          number(fixed.optimizer), measured.dynamic[which]},
                         fmt::format("{:.0f} % of FP32", 100 * total(measured) / total(all.front()))});
  }
  return {.file = "precision-bytes",
          .title = "Static and dynamic bytes",
          .caption = fmt::format("batch {}", batches[which]),
          .made = fmt::format("The network of sin-cos, {} wide, AdamW.", network_width(flags.quick)),
          .content = bars};
}

// Of every batch, because the share of static bytes depends on the batch.
Exhibit table_of(const std::vector<Measured>& all, const std::vector<int64_t>& batches, const CompareFlags& flags) {
  Table table{.header = {"batch", "FP32, static", "FP32, dynamic", "dynamic over static"}};
  for (size_t m = 1; m < all.size(); ++m) {
    table.header.push_back(fmt::format("{}, all of FP32's", all[m].recipe->name));
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    const auto total = [&](const Measured& m) { return static_cast<double>(m.fixed.total()) + m.dynamic[i]; };
    table.rows.push_back({fmt::format("{}", batches[i]), bytes_text(all[0].fixed.total()),
                          bytes_text(std::llround(all[0].dynamic[i])),
                          fmt::format("{:.2f}", all[0].dynamic[i] / static_cast<double>(all[0].fixed.total()))});
    for (size_t m = 1; m < all.size(); ++m) {
      table.rows.back().push_back(fmt::format("{:.0f} %", 100 * total(all[m]) / total(all[0])));
    }
  }
  return {.file = "precision-table",
          .title = "Static and dynamic bytes, by batch",
          .made = fmt::format("The network of sin-cos, {} wide, AdamW; counted by the allocator.",
                              network_width(flags.quick)),
          .content = table};
}

// The batch whose first step peaks at `limit` bytes of live memory, if the peak is affine in the batch.
int64_t expected_batch(const Recipe& recipe, int64_t limit, const CompareFlags& flags) {
  constexpr int64_t kSmall = 512, kLarge = 1024;
  const int64_t level = MemoryLimit::smallest(flags.device).count();
  const auto peak_at = [&](int64_t items) {
    const MemoryMeter meter(flags.device);
    Run(recipe, flags).step(two_tasks_data(items, flags.device));
    return static_cast<double>(level + meter.report().peak_bytes);
  };
  const double small = peak_at(kSmall), slope = (peak_at(kLarge) - small) / (kLarge - kSmall);
  return kSmall + std::llround((static_cast<double>(limit) - small) / std::max(slope, 1.0));
}

Exhibit largest_batches(Section& section, const CompareFlags& flags) {
  // CUDA's libraries keep some tens of MiB.
  const int64_t limit = (flags.quick && !flags.device.is_cuda() ? int64_t{6} : int64_t{256}) << 20;
  const int64_t most = flags.quick ? 1 << 14 : 1 << 16;
  Bars bars{.quantity = Quantity::Count, .parts = {"batch"}};
  std::vector<Recipe> recipes(kRecipes.begin(), kRecipes.end());
  recipes.push_back({"FP32, micro-batches of 256", Precision::Float32, Weights::Full, 256});
  for (const Recipe& recipe : recipes) {
    const auto trains = [&](int64_t items) {
      return fits(flags.device, limit, [&] {
        Run run({recipe.name, recipe.precision, recipe.weights, std::min(recipe.micro_batch, items)}, flags);
        run.step(two_tasks_data(items, flags.device));
      });
    };
    const int64_t batch = largest(most, trains, expected_batch(recipe, limit, flags));
    bars.bars.push_back(
        {recipe.name, {static_cast<double>(batch)}, batch == most ? "and more: no end was looked for" : ""});
  }
  section.findings.push_back(
      fmt::format("Under one limit of {}, FP32 trains with a batch of {:.0f}, autocast with {:.0f}, 16-bit weights "
                  "with {:.0f}, and micro-batches with {:.0f} and more, in FP32 and with the same gradients.",
                  bytes_text(limit), bars.bars[0].values[0], bars.bars[1].values[0], bars.bars[2].values[0],
                  bars.bars[3].values[0]));
  return {.file = "precision-largest-batch",
          .title = "The largest batch under one limit",
          .caption = fmt::format("all live tensor memory within {}", bytes_text(limit)),
          .made = "Found by trying: one step with AdamW for each batch, under a MemoryLimit.",
          .content = bars};
}

}  // namespace

Section compare_precision(const CompareFlags& flags) {
  Section section{
      .name = "precision",
      .title = "Precision: what the bytes are for",
      .idea =
          "Weights, gradients and optimizer state are there whatever the batch; activations grow with it. Autocast "
          "halves what grows and leaves the rest; 16-bit weights with FP32 masters do not make the rest smaller "
          "either."};
  std::vector<int64_t> batches{16, 64, 256, 1024};
  if (!flags.quick) {
    batches = {64, 256, 1024, 4096, 16384};
  }
  std::vector<Measured> all;
  for (const Recipe& recipe : kRecipes) {
    all.push_back(measure_recipe(recipe, batches, flags));
  }
  const size_t which = kShownBatch;
  const auto ratio = [&](size_t i) { return all[0].dynamic[i] / static_cast<double>(all[0].fixed.total()); };
  const double total = static_cast<double>(all[0].fixed.total()) + all[0].dynamic[which];
  for (const Measured& measured : all) {
    const double own = static_cast<double>(measured.fixed.total()) + measured.dynamic[which];
    section.numbers.push_back({measured.recipe->name, bytes_text(std::llround(own)),
                               fmt::format("batch {}, {:.0f} % of FP32", batches[which], 100 * own / total)});
  }
  section.findings.push_back(fmt::format(
      "The dynamic bytes of FP32 are {:.2g} times the static ones at batch {} and {:.2g} times at {}: they "
      "grow with the batch, so that any factor, also the articles' 3 to 4, is one of some batch. At batch {} "
      "autocast takes {:.0f} % of FP32's dynamic bytes, 16-bit weights {:.0f} %.",
      ratio(0), batches.front(), ratio(batches.size() - 1), batches.back(), batches[which],
      100 * all[1].dynamic[which] / all[0].dynamic[which], 100 * all[2].dynamic[which] / all[0].dynamic[which]));
  section.exhibits.push_back(bytes_figure(all, batches, which, flags));
  section.exhibits.push_back(dynamic_figure(all, batches, flags));
  section.exhibits.push_back(table_of(all, batches, flags));
  section.exhibits.push_back(largest_batches(section, flags));
  return section;
}

}  // namespace snug::cli
