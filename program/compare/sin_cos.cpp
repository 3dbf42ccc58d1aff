// The sin-cos experiment: the effect of mixed precision on a small network, in the five lines that articles print, and
// other remedies for the network's speed on this machine.

#include <algorithm>
#include <numbers>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/compare/experiment.h"
#include "program/compare/sin_cos_width.h"
#include "program/measure/measure.h"
#include "program/measure/two_tasks.h"

namespace snug::cli {

using namespace measure;

namespace {

struct SinCosTraining {
  Curve losses;
  at::Tensor fit;  // [M, 2] at the places where the fit is drawn
};

SinCosTraining train(const Way& way, int64_t epochs, const at::Tensor& places) {
  SinCosTraining training{.losses = {.name = way.name, .x = {}, .y = {}}, .fit = {}};
  for (int64_t epoch = 1; epoch <= epochs; ++epoch) {
    const double loss = way.epoch(true);
    training.losses.x.push_back(static_cast<double>(epoch));
    training.losses.y.push_back(loss);
    if (epoch % 20 == 0 || epoch == epochs) {
      fmt::print("{:<28} epoch {:>5}  loss {:.6f}\n", way.name, epoch, loss);
    }
  }
  const torch::NoGradGuard no_grad;
  training.fit = (*way.model)->forward(places.to(way.device)).cpu().to(torch::kFloat);
  return training;
}

std::vector<double> values_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().cpu().to(torch::kDouble).contiguous();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

enum class Shown { Values, Errors };

// A learned task over the truth; or both less the truth, so that the noise can be seen, too.
Exhibit fit_figure(int64_t column, Shown what, const TwoTasksData& data, const at::Tensor& places,
                   const std::vector<SinCosTraining>& trainings) {
  const bool is_sine = column == 0, errors = what == Shown::Errors;
  const auto truth = [&](const at::Tensor& x) { return is_sine ? x.sin() : x.cos(); };
  const auto drawn = [&](const at::Tensor& x, const at::Tensor& y) {
    return values_of(errors ? y.reshape({-1}) - truth(x).reshape({-1}) : y);
  };
  const char* name = is_sine ? "sine" : "cosine";
  const int64_t shown = std::min<int64_t>(data.x.size(0), 400);
  const at::Tensor some = data.x.narrow(0, 0, shown);
  Plot plot{.x = {.title = "x"}, .y = {.title = errors ? "error" : is_sine ? "sin x" : "cos x"}, .wide = false};
  plot.curves.push_back({.name = "noisy data",
                         .x = values_of(some),
                         .y = drawn(some, data.y.narrow(0, 0, shown).select(1, column)),
                         .drawn = Drawn::Points});
  if (!errors) {
    plot.curves.push_back({.name = "truth", .x = values_of(places), .y = values_of(truth(places))});
  }
  for (const SinCosTraining& training : trainings) {
    plot.curves.push_back(
        {.name = training.losses.name, .x = values_of(places), .y = drawn(places, training.fit.select(1, column))});
  }
  return {.file = fmt::format("sin-cos-{}{}", name, errors ? "-error" : ""),
          .title = errors ? fmt::format("How far the {} is off", name) : fmt::format("The {}, learned", name),
          .made = fmt::format("After {} epochs, at {} places; {} of {} points of the data.",
                              trainings.front().losses.x.size(), places.size(0), shown, data.x.size(0)),
          .content = plot};
}

// The largest difference from the truth.
double error_of(const SinCosTraining& training, const at::Tensor& places) {
  return (training.fit - torch::cat({places.sin(), places.cos()}, 1)).abs().max().item<double>();
}

struct Timed {
  std::vector<Way> ways;
  int64_t epochs_a_turn;
  Turns turns = {};
};

Timed time_ways(const CompareFlags& flags, const TwoTasksData& data) {
  Timed timed{.ways = {}, .epochs_a_turn = flags.quick || flags.epochs > 0 ? 10 : 50};
  timed.ways.push_back(articles_loop("LibTorch, FP32", data, kTwoTasksWidth, std::nullopt));
  timed.ways.push_back(articles_loop("autocast to BF16", data, kTwoTasksWidth, torch::kBFloat16));
  const int64_t full = fastest_micro_batch(data, kTwoTasksWidth, Precision::Float32);
  const int64_t half = fastest_micro_batch(data, kTwoTasksWidth, Precision::BFloat16);
  timed.ways.push_back(stepper_loop(fmt::format("snug, FP32, micro-batches of {}", full), data, kTwoTasksWidth,
                                    Precision::Float32, full));
  timed.ways.push_back(stepper_loop(fmt::format("snug, BF16, micro-batches of {}", half), data, kTwoTasksWidth,
                                    Precision::BFloat16, half));
  std::vector<std::function<double()>> programs;
  for (const Way& way : timed.ways) {
    programs.emplace_back([way, epochs = timed.epochs_a_turn] { return way.seconds_of_epochs(epochs); });
  }
  timed.turns = take_turns(programs, flags.turns(7));
  return timed;
}

// Total times are the times of the turns, scaled to all epochs.
void tell_times(Section& section, const Timed& timed, int64_t epochs) {
  const double scale = static_cast<double>(epochs) / static_cast<double>(timed.epochs_a_turn);
  Table table{.header = {"way", "seconds", "lowest to highest", "time against LibTorch, FP32"}};
  Bars bars{.parts = {"seconds"}};
  for (size_t i = 0; i < timed.ways.size(); ++i) {
    const Spread& seconds = timed.turns.seconds(i);
    table.rows.push_back({timed.ways[i].name, fmt::format("{:.2f}", seconds.median * scale),
                          fmt::format("{:.2f} to {:.2f}", seconds.low * scale, seconds.high * scale),
                          str(timed.turns.ratio(i))});
    bars.bars.push_back({timed.ways[i].name,
                         {seconds.median * scale},
                         fmt::format("s, {:.2f} of FP32's", timed.turns.ratio(i).median)});
  }
  const std::string made =
      fmt::format("Medians of {} epochs a turn, carried over to {}; all ways took turns.", timed.epochs_a_turn, epochs);
  section.exhibits.push_back(
      {.file = "sin-cos-times", .title = "Time to train", .caption = "seconds", .made = made, .content = bars});
  section.exhibits.push_back(
      {.file = "sin-cos-times-spread", .title = "Time to train, with spread", .made = made, .content = table});
}

void tell_five_lines(Section& section, const Timed& timed, int64_t epochs, int64_t points, c10::Device device) {
  const double scale = static_cast<double>(epochs) / static_cast<double>(timed.epochs_a_turn);
  const double full = timed.turns.seconds(0).median * scale;
  const double mixed = full * timed.turns.ratio(1).median;
  const std::string settings =
      fmt::format("{} points, hidden {}, {} epochs, Adam {}", points, kTwoTasksWidth, epochs, kTwoTasksRate);
  section.numbers = {{"FP32 training time", fmt::format("{:.2f} s", full), settings},
                     {"Mixed precision training time", fmt::format("{:.2f} s", mixed), "autocast to BF16"},
                     {"Time saved", fmt::format("{:.2f} s", full - mixed)},
                     {"Reduction", fmt::format("{:.1f} %", 100 * (1 - mixed / full))},
                     {"Speedup", fmt::format("{:.2f} x", full / mixed), "median of turns"}};
  fmt::print("\n{}, {}\n", machine(device), settings);
  for (const KeyNumber& number : section.numbers) {
    fmt::print("{}: {}\n", number.label, number.value);
  }
}

}  // namespace

Section compare_sin_cos(const CompareFlags& flags) {
  const int64_t points = flags.points > 0 ? flags.points : 20000;
  const int64_t epochs = flags.epochs > 0 ? flags.epochs : flags.quick ? 100 : 1000;
  Section section{
      .name = "sin-cos",
      .title = "Sine and cosine: one network, two precisions",
      .idea =
          "A trunk of three layers and two heads learns sin x and cos x from noisy points, the whole data set as one "
          "batch. Initial weights, loss function and optimizer are the same; only the type that matrix products "
          "compute in differs. The article whose five lines these are reports 3.11 s in FP32 and 2.13 s in mixed "
          "precision on a GPU, 31.6 % less."};
  const TwoTasksData data = two_tasks_data(points, flags.device);
  const at::Tensor places = torch::linspace(-2 * std::numbers::pi, 2 * std::numbers::pi, 300).unsqueeze(1);
  std::vector<SinCosTraining> trainings;
  trainings.push_back(train(articles_loop("FP32", data, kTwoTasksWidth, std::nullopt), epochs, places));
  trainings.push_back(train(articles_loop("BF16 autocast", data, kTwoTasksWidth, torch::kBFloat16), epochs, places));
  const Timed timed = time_ways(flags, data);
  tell_five_lines(section, timed, epochs, points, flags.device);
  for (const SinCosTraining& training : trainings) {
    section.findings.push_back(
        fmt::format("{}: loss {:.2g} after {} epochs, and nowhere further than {:.2g} from the truth.",
                    training.losses.name, training.losses.y.back(), epochs, error_of(training, places)));
  }
  section.findings.push_back(fmt::format(
      "In BF16 the last loss is {:.1f} times that in FP32{}.",
      trainings[1].losses.y.back() / trainings[0].losses.y.back(),
      timed.turns.ratio(1).median < 1 ? "" : ", and nothing is saved: this processor is no faster in 16 bits"));
  for (const Shown what : {Shown::Values, Shown::Errors}) {
    section.exhibits.push_back(fit_figure(0, what, data, places, trainings));
    section.exhibits.push_back(fit_figure(1, what, data, places, trainings));
  }
  section.exhibits.push_back({.file = "sin-cos-loss",
                              .title = "Loss",
                              .caption = "MSE of the sine + MSE of the cosine",
                              .made = fmt::format("{} points, full batch, seed 2 for both.", points),
                              .content = Plot{.x = {.title = "epoch"},
                                              .y = {.title = "loss", .log_base = 10},
                                              .curves = {trainings[0].losses, trainings[1].losses}}});
  tell_times(section, timed, epochs);
  sweep_two_tasks_width(section, flags, points);
  return section;
}

}  // namespace snug::cli
