// The accumulation experiment: one batch in more and more micro-batches, with and without BatchNorm, with BatchNorm
// also on several ranks; and the effect of the batch size itself.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/compare/experiment.h"
#include "program/compare/ranks.h"
#include "program/datasets/digits.h"
#include "program/measure/measure.h"
#include "program/models/mlp.h"
#include "program/run/config.h"
#include "program/run/device.h"
#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "snug/distributed/sync_batch_norm.h"
#include "snug/extra/batch_norm.h"
#include "snug/sgd.h"
#include "snug/stepper.h"

namespace snug::cli {

using namespace measure;

namespace {

using at::Tensor;
namespace nn = torch::nn;

constexpr int64_t kTrained = 4096;  // the other digits are held out

struct Split {
  Tensor images, labels;
};

struct DigitsSplit {
  Split train, held_out;
};

DigitsSplit load(const CompareFlags& flags) {
  const Digits digits = load_digits(flags.digits);
  const int64_t all = digits.images.size(0);
  const auto part = [&](int64_t begin, int64_t count) {
    return Split{digits.images.narrow(0, begin, count).to(flags.device),
                 digits.labels.narrow(0, begin, count).to(flags.device)};
  };
  return {part(0, std::min(kTrained, all - 1)), part(std::min(kTrained, all - 1), all - std::min(kTrained, all - 1))};
}

Tensor cross_entropy_sum(const Tensor& logits, const Tensor& labels) {
  return nn::functional::cross_entropy(logits, labels,
                                       nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

Mlp digits_mlp(c10::Device device) {
  torch::manual_seed(3);
  Mlp model(MlpOptions{.sizes = {784, 256, 256, 10}});
  move_to(*model, device);
  return model;
}

// --- One batch of 512 in micro-batches.

struct Steps {
  std::vector<double> losses;
  int64_t activations = 0;
};

// One rank's share of each batch.
struct Ranks {
  DataParallel* data_parallel = nullptr;
  int rank = 0, size = 1;
};

template <class Model, class Forward>
Steps run_steps(Model& model, const Split& data, int64_t micro_batch, int64_t steps, const Forward& forward,
                const Ranks& ranks = {}) {
  SGD sgd(model->parameters(), {.lr = 0.05, .momentum = 0.9});
  Stepper stepper(model, sgd, {.micro_batch = micro_batch, .ranks = {.data_parallel = ranks.data_parallel}});
  const int64_t share = 512 / ranks.size;
  Steps result;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t begin = step * 512 % (data.images.size(0) - 511) + ranks.rank * share;
    const StepResult done = stepper.step(
        {data.images.narrow(0, begin, share), data.labels.narrow(0, begin, share)},
        [&](const Batch& micro) { return Loss::sum(cross_entropy_sum(forward(micro[0]), micro[1]), micro.size()); });
    result.losses.push_back(done.loss());
    result.activations = std::max(result.activations, done.activation_peak_bytes);
  }
  return result;
}

Steps mlp_steps(const Split& data, int64_t micro_batch, int64_t steps) {
  Mlp model = digits_mlp(data.images.device());
  return run_steps(model, data, micro_batch, steps, [&](const Tensor& x) { return model->forward(x.flatten(1)); });
}

constexpr std::array<int64_t, 7> kMicroBatches{512, 256, 128, 64, 32, 16, 8};

void same_losses(Section& section, const Split& data, const CompareFlags& flags) {
  constexpr int64_t kSteps = 20;
  const Steps whole = mlp_steps(data, 512, kSteps);
  std::vector<std::function<double()>> programs;
  for (const int64_t size : kMicroBatches) {
    programs.emplace_back(
        [&data, size, device = flags.device] { return seconds_of(device, [&] { mlp_steps(data, size, 4); }); });
  }
  const Turns turns = take_turns(programs, flags.turns(7));
  Table table{.header = {"512 as", "largest relative difference of a loss", "activation peak", "time, 1 x 512 = 1"}};
  double largest_difference = 0;
  for (size_t i = 0; i < kMicroBatches.size(); ++i) {
    const Steps split = mlp_steps(data, kMicroBatches[i], kSteps);
    double difference = 0;
    for (size_t step = 0; step < whole.losses.size(); ++step) {
      difference = std::max(difference, std::abs(split.losses[step] / whole.losses[step] - 1));
    }
    largest_difference = std::max(largest_difference, difference);
    table.rows.push_back({fmt::format("{} x {}", 512 / kMicroBatches[i], kMicroBatches[i]),
                          fmt::format("{:.1e}", difference), bytes_text(split.activations), str(turns.ratio(i))});
  }
  section.findings.push_back(
      fmt::format("Without BatchNorm the split changes no loss by more than {:.1e} of it in {} steps: rounding, as "
                  "sums are taken in another order.",
                  largest_difference, kSteps));
  section.exhibits.push_back({.file = "accumulation-split",
                              .title = "One batch of 512, in micro-batches",
                              .made = "An MLP 784-256-256-10 on the digits, SGD with momentum.",
                              .content = table});
}

// --- BatchNorm.

enum class Norm { Batch, Momentum, Precise, Frozen, Group };

struct NormRun {
  std::string name;
  Norm norm;
  int64_t micro_batch;
};

double error_rate(nn::Sequential& model, const Split& data) {
  const torch::NoGradGuard no_grad;
  model->eval();
  int64_t wrong = 0;
  for (int64_t begin = 0; begin < data.images.size(0); begin += 256) {
    const int64_t count = std::min<int64_t>(256, data.images.size(0) - begin);
    const Tensor said = model->forward(data.images.narrow(0, begin, count)).argmax(1);
    wrong += (said != data.labels.narrow(0, begin, count)).sum().item<int64_t>();
  }
  model->train();
  return static_cast<double>(wrong) / static_cast<double>(data.images.size(0));
}

struct NormResult {
  double loss, error;
};

nn::Sequential normalised_mlp() {
  torch::manual_seed(3);
  return nn::Sequential(nn::Flatten(), nn::Linear(784, 128), nn::BatchNorm1d(128), nn::ReLU(), nn::Linear(128, 128),
                        nn::BatchNorm1d(128), nn::ReLU(), nn::Linear(128, 10));
}

NormResult train_with_norm(const NormRun& run, const DigitsSplit& digits, int64_t steps) {
  nn::Sequential model = normalised_mlp();
  if (run.norm == Norm::Group) {
    batch_norm_to_group_norm(*model, 4);
  } else if (run.norm == Norm::Momentum) {
    adjust_batch_norm_momentum(*model, 512 / run.micro_batch);
  }
  move_to(*model, digits.train.images.device());
  std::optional<FrozenBatchNorm> frozen;
  if (run.norm == Norm::Frozen) {  // as in fine-tuning: statistics from before, in this case of the untrained network
    precise_batch_norm(*model, [&] { model->forward(digits.train.images.narrow(0, 0, 512)); });
    frozen.emplace(*model);
  }
  const Steps done =
      run_steps(model, digits.train, run.micro_batch, steps, [&](const Tensor& x) { return model->forward(x); });
  frozen.reset();
  if (run.norm == Norm::Precise) {
    precise_batch_norm(*model, [&] {
      const int64_t end = std::min<int64_t>(1024, digits.train.images.size(0));
      for (int64_t begin = 0; begin + run.micro_batch <= end; begin += run.micro_batch) {
        model->forward(digits.train.images.narrow(0, begin, run.micro_batch));
      }
    });
  }
  return {done.losses.back(), error_rate(model, digits.held_out)};
}

int64_t norm_steps(const CompareFlags& flags) { return flags.quick ? 16 : 64; }

// Trains with the batch shared out to ranks. BatchNorm sees the rank's own share, or all shares.
NormResult train_on_ranks(const std::shared_ptr<ProcessGroup>& group, bool is_synchronised, const DigitsSplit& digits,
                          int64_t steps) {
  nn::Sequential model = normalised_mlp();
  if (is_synchronised) {
    convert_sync_batch_norm(*model, group);
  }
  DataParallel data_parallel(model, group);
  const Ranks ranks{.data_parallel = &data_parallel, .rank = group->rank(), .size = group->size()};
  const Steps done = run_steps(
      model, digits.train, 512 / ranks.size, steps, [&](const Tensor& x) { return model->forward(x); }, ranks);
  return {done.losses.back(), error_rate(model, digits.held_out)};
}

constexpr std::string_view kRankRow = "accumulation-row";

void add_ranks(Table& table, int ranks, const CompareFlags& flags) {
  const std::vector<std::string> lines = lines_of_ranks("accumulation", ranks, flags, kRankRow, 2);
  for (const std::string& line : lines) {
    int is_synchronised = 0;
    NormResult result = {};
    if (std::sscanf(line.c_str(), "%d %lf %lf", &is_synchronised, &result.loss, &result.error) != 3) {
      throw Error("compare: the ranks' result cannot be read: " + line);
    }
    table.rows.push_back(
        {fmt::format("{}, {} ranks x {}", is_synchronised != 0 ? "synchronised BatchNorm" : "BatchNorm", ranks,
                     512 / ranks),
         fmt::format("{:.6f}", result.loss), percent(result.error)});
  }
}

void with_batch_norm(Section& section, const DigitsSplit& digits, const CompareFlags& flags) {
  const int64_t steps = norm_steps(flags);
  const std::vector<NormRun> runs{{"BatchNorm, 1 x 512", Norm::Batch, 512},
                                  {"BatchNorm, 64 x 8", Norm::Batch, 8},
                                  {"momentum corrected, 64 x 8", Norm::Momentum, 8},
                                  {"precise statistics, 64 x 8", Norm::Precise, 8},
                                  {"frozen, 1 x 512", Norm::Frozen, 512},
                                  {"frozen, 64 x 8", Norm::Frozen, 8},
                                  {"GroupNorm, 1 x 512", Norm::Group, 512},
                                  {"GroupNorm, 64 x 8", Norm::Group, 8}};
  Table table{.header = {"normalisation and split", "last training loss", "held-out errors"}};
  for (const NormRun& run : runs) {
    const NormResult result = train_with_norm(run, digits, steps);
    table.rows.push_back({run.name, fmt::format("{:.6f}", result.loss), percent(result.error)});
  }
  section.findings.push_back(fmt::format(
      "With BatchNorm micro-batches of 8 are another training (held-out errors {} against {} with the "
      "whole batch). Frozen BatchNorm and GroupNorm look at one picture alone: a split changes only rounding, "
      "which {} steps let grow (frozen: {} and {}, last losses {} and {}; GroupNorm: {} and {}, {} and {}).",
      table.rows[1][2], table.rows[0][2], steps, table.rows[4][2], table.rows[5][2], table.rows[4][1], table.rows[5][1],
      table.rows[6][2], table.rows[7][2], table.rows[6][1], table.rows[7][1]));
  if (flags.device.is_cpu()) {
    for (const int ranks : {2, 4}) {
      add_ranks(table, ranks, flags);
    }
    section.findings.push_back(
        fmt::format("On 4 ranks with 128 pictures each, BatchNorm ends at a training loss of {}, synchronised at {}, "
                    "one process with all 512 at {}.",
                    table.rows[table.rows.size() - 2][1], table.rows.back()[1], table.rows.front()[1]));
  } else {
    section.findings.emplace_back(
        "BatchNorm over 2 and 4 ranks is left out: the ranks of this experiment are for the CPU.");
  }
  section.exhibits.push_back(
      {.file = "accumulation-batch-norm",
       .title = "Normalisation over micro-batches",
       .caption = "what micro-batches and ranks do to an MLP 784-128-128-10 on the digits",
       .made = fmt::format("{} steps of batch 512, SGD with momentum; errors on {} pictures in evaluation mode.", steps,
                           digits.held_out.images.size(0)),
       .content = table});
}

// --- The size of the batch.

double mean_loss(Mlp& model, const Split& data) {
  const torch::NoGradGuard no_grad;
  return cross_entropy_sum(model->forward(data.images.flatten(1)), data.labels).item<double>() /
         static_cast<double>(data.images.size(0));
}

struct BatchRun {
  double train = 0, held_out = 0, seconds = 0;
};

BatchRun train_with_batch(const DigitsSplit& digits, int64_t batch, LrScaling rule, int64_t epochs) {
  Mlp model = digits_mlp(digits.train.images.device());
  SGD sgd(model->parameters(), {.lr = scale_learning_rate(0.02, batch, 64, rule), .momentum = 0.9});
  const int64_t count = digits.train.images.size(0);
  BatchRun run;
  run.seconds = seconds_of(digits.train.images.device(), [&] {
    for (int64_t epoch = 0; epoch < epochs; ++epoch) {
      torch::manual_seed(static_cast<uint64_t>(100 + epoch));
      const Tensor order = torch::randperm(count).to(digits.train.images.device());
      for (int64_t begin = 0; begin + batch <= count; begin += batch) {
        const Tensor chosen = order.narrow(0, begin, batch);
        model->zero_grad();
        (cross_entropy_sum(model->forward(digits.train.images.index_select(0, chosen).flatten(1)),
                           digits.train.labels.index_select(0, chosen)) /
         static_cast<double>(batch))
            .backward();
        sgd.step();
      }
    }
  });
  run.train = mean_loss(model, digits.train);
  run.held_out = mean_loss(model, digits.held_out);
  return run;
}

// At the weights at the start of training: the squared distance of the batches' gradients from their mean, divided by
// the squared mean.
double gradient_variance(const Split& data, int64_t batch) {
  Mlp model = digits_mlp(data.images.device());
  std::vector<Tensor> gradients;
  for (int64_t begin = 0; begin + batch <= data.images.size(0) && gradients.size() < 16; begin += batch) {
    model->zero_grad();
    (cross_entropy_sum(model->forward(data.images.narrow(0, begin, batch).flatten(1)),
                       data.labels.narrow(0, begin, batch)) /
     static_cast<double>(batch))
        .backward();
    std::vector<Tensor> flat;
    for (const Tensor& parameter : model->parameters()) {
      flat.push_back(parameter.grad().flatten());
    }
    gradients.push_back(torch::cat(flat));
  }
  if (gradients.size() < 2) {
    return std::nan("");
  }
  const Tensor all = torch::stack(gradients);
  const Tensor mean = all.mean(0);
  return ((all - mean).square().sum() / static_cast<double>(gradients.size() - 1) / mean.square().sum()).item<double>();
}

void sizes_of_batches(Section& section, const DigitsSplit& digits, const CompareFlags& flags) {
  const int64_t epochs = flags.quick ? 4 : 15;
  std::vector<int64_t> batches{16, 64, 256, 1024, digits.train.images.size(0)};
  struct Rule {
    const char* name;
    LrScaling scaling;
  };
  constexpr std::array kRules{Rule{"same rate", LrScaling::None}, Rule{"linear rule", LrScaling::Linear},
                              Rule{"square root rule", LrScaling::Sqrt}};
  Plot losses{.x = {.title = "batch", .log_base = 2}, .y = {.title = "loss", .log_base = 10}};
  Table table{.header = {"batch", "rule", "training loss", "held-out loss", "gap", "variance of gradients", "seconds"}};
  for (const Rule& rule : kRules) {
    losses.curves.push_back(
        {.name = fmt::format("held out, {}", rule.name), .x = {}, .y = {}, .drawn = Drawn::LineAndPoints});
    losses.curves.push_back(
        {.name = fmt::format("training, {}", rule.name), .x = {}, .y = {}, .drawn = Drawn::LineAndPoints});
  }
  Curve variance{.name = "variance / squared mean", .x = {}, .y = {}, .drawn = Drawn::LineAndPoints};
  for (const int64_t batch : batches) {
    const double spread = gradient_variance(digits.train, batch);
    if (std::isfinite(spread)) {
      variance.x.push_back(static_cast<double>(batch));
      variance.y.push_back(spread);
    }
    for (size_t r = 0; r < kRules.size(); ++r) {
      const BatchRun run = train_with_batch(digits, batch, kRules[r].scaling, epochs);
      for (const auto& [curve, value] : {std::pair{2 * r, run.held_out}, {2 * r + 1, run.train}}) {
        losses.curves[curve].x.push_back(static_cast<double>(batch));
        losses.curves[curve].y.push_back(value);
      }
      table.rows.push_back({fmt::format("{}", batch), kRules[r].name, fmt::format("{:.3f}", run.train),
                            fmt::format("{:.3f}", run.held_out), fmt::format("{:+.3f}", run.held_out - run.train),
                            std::isfinite(spread) ? fmt::format("{:.2g}", spread) : "",
                            fmt::format("{:.2f}", run.seconds)});
    }
  }
  const std::string made = fmt::format(
      "An MLP 784-256-256-10, {} epochs of {} digits whatever the batch, SGD with momentum 0.9, rate 0.02 at batch 64.",
      epochs, digits.train.images.size(0));
  section.exhibits.push_back({.file = "accumulation-batch",
                              .title = "What large and small batches do",
                              .caption = "loss after equally many epochs",
                              .made = made,
                              .content = losses});
  section.exhibits.push_back(
      {.file = "accumulation-variance",
       .title = "Noise of the gradient",
       .caption = "variance from batch to batch over the squared mean",
       .made = "At the initial weights, over up to 16 batches.",
       .content = Plot{
           .x = {.title = "batch", .log_base = 2}, .y = {.title = "variance", .log_base = 10}, .curves = {variance}}});
  section.exhibits.push_back(
      {.file = "accumulation-batch-table", .title = "Batches in numbers", .made = made, .content = table});
  const double small = losses.curves[0].y.front(), large = losses.curves[0].y.back(),
               scaled = losses.curves[2].y.back();
  section.findings.push_back(
      fmt::format("After equally many epochs at the same rate, the held-out loss is {:.3f} with batches of {} and "
                  "{:.3f} with batches of {}: a large batch "
                  "makes few steps. The linear rule makes {:.3f} of the latter.",
                  small, batches.front(), large, batches.back(), scaled));
}

}  // namespace

void measure_accumulation_rank(const CompareFlags& flags) {
  const auto group = init_process_group();
  const DigitsSplit digits = load(flags);
  for (const bool is_synchronised : {false, true}) {
    const NormResult result = train_on_ranks(group, is_synchronised, digits, norm_steps(flags));
    if (group->rank() == 0) {
      fmt::print("{} {:d} {} {}\n", kRankRow, is_synchronised, result.loss, result.error);
    }
  }
  group->barrier();
}

Section compare_accumulation(const CompareFlags& flags) {
  Section section{.name = "accumulation",
                  .title = "Accumulation: one batch in many parts",
                  .idea =
                      "A batch that does not fit is run in micro-batches whose gradients add up to the batch's. That "
                      "is exact, unless a layer "
                      "looks at more than one sample; and whether a large batch is wanted is another question."};
  const DigitsSplit digits = load(flags);
  fmt::print("one batch of 512 in micro-batches\n");
  same_losses(section, digits.train, flags);
  fmt::print("BatchNorm over micro-batches\n");
  with_batch_norm(section, digits, flags);
  fmt::print("batches of {} to {}\n", 16, digits.train.images.size(0));
  sizes_of_batches(section, digits, flags);
  return section;
}

}  // namespace snug::cli
