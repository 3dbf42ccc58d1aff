// Schedules, clipping by value and Ema driven line by line, so that a script can compare them with Python. One command per line of
// stdin, one answer per line of stdout. Floats go as hexadecimal (the strtod and float.hex notation), so none is rounded.
//
//   cosine PEAK WARMUP TOTAL FLOOR STEPS                    the rates of steps 0 to STEPS - 1
//   linear PEAK WARMUP TOTAL FLOOR STEPS
//   constant PEAK WARMUP STEPS
//   step INITIAL EVERY GAMMA STEPS
//   one_cycle PEAK TOTAL PCT cos|linear DIV FINAL_DIV STEPS
//   plateau LR min|max FACTOR PATIENCE THRESHOLD rel|abs COOLDOWN MIN_LR EPS METRICS...      the rate after each metric
//   clip VALUE GRADIENT...                                  the clipped gradient
//   ema DECAY fp32|bf16 UPDATES WEIGHTS...                  the average of UPDATES rows of weights

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "snug/optim/clip.h"
#include "snug/optim/ema.h"
#include "snug/optim/lr_schedule.h"
#include "snug/optim/plateau.h"
#include "snug/optim/schedule.h"

namespace {

using torch::Tensor;

std::string word(std::istream& words) {
  std::string text;
  words >> text;
  return text;
}
double number(std::istream& words) { return std::strtod(word(words).c_str(), nullptr); }
int64_t count(std::istream& words) { return static_cast<int64_t>(number(words)); }

std::vector<double> numbers(std::istream& words) {
  std::vector<double> values;
  for (std::string text; words >> text;) {
    values.push_back(std::strtod(text.c_str(), nullptr));
  }
  return values;
}

std::string text_of(const std::vector<double>& values) {
  std::string text;
  for (const double value : values) {
    text += fmt::format("{:a} ", value);
  }
  return text;
}

std::string text_of(const Tensor& tensor) {
  const Tensor wide = tensor.to(torch::kDouble).contiguous();
  return text_of(std::vector<double>(wide.data_ptr<double>(), wide.data_ptr<double>() + wide.numel()));
}

torch::optim::SGD optimizer_with(double lr) {
  return torch::optim::SGD({torch::ones({1}, torch::requires_grad())}, torch::optim::SGDOptions(lr));
}

/// What an optimizer gets, with a skipped step before each that counts.
template <class Schedule>
std::string rates(Schedule schedule, int64_t steps) {
  torch::optim::SGD optimizer = optimizer_with(1);
  snug::LrSchedule in_optimizer(optimizer, schedule);
  std::vector<double> rates;
  for (int64_t step = 0; step < steps; ++step) {
    rates.push_back(optimizer.param_groups()[0].options().get_lr());
    in_optimizer.step(false);
    in_optimizer.step(true);
  }
  return text_of(rates);
}

std::string plateau(std::istream& words) {
  torch::optim::SGD optimizer = optimizer_with(number(words));
  snug::PlateauOptions options;
  options.mode = word(words) == "min" ? snug::PlateauOptions::Mode::Min : snug::PlateauOptions::Mode::Max;
  options.factor = number(words);
  options.patience = count(words);
  options.threshold = number(words);
  options.threshold_mode =
      word(words) == "rel" ? snug::PlateauOptions::Threshold::Relative : snug::PlateauOptions::Threshold::Absolute;
  options.cooldown = count(words);
  options.min_lr = number(words);
  options.eps = number(words);
  snug::ReduceOnPlateau scheduler(optimizer, options);
  std::vector<double> rates;
  for (const double metric : numbers(words)) {
    scheduler.step(metric);
    rates.push_back(optimizer.param_groups()[0].options().get_lr());
  }
  return text_of(rates);
}

std::string ema(std::istream& words) {
  const double decay = number(words);
  const auto type = word(words) == "bf16" ? torch::kBFloat16 : torch::kFloat;
  const int64_t updates = count(words);
  const Tensor rows = torch::tensor(numbers(words), torch::kDouble).reshape({updates, -1}).to(type);
  const Tensor parameter = torch::zeros_like(rows[0]);
  snug::Ema average({parameter}, {.decay = decay});
  for (int64_t i = 0; i < updates; ++i) {
    parameter.copy_(rows[i]);
    average.update();
  }
  return text_of(average.averages()[0]);
}

std::string clip(std::istream& words) {
  const double value = number(words);
  const Tensor gradient = torch::tensor(numbers(words), torch::kDouble).to(torch::kFloat);
  const Tensor parameter = torch::zeros_like(gradient).requires_grad_();
  parameter.mutable_grad() = gradient;
  snug::clip_grad_value_({parameter}, value);
  return text_of(gradient);
}

std::string answer(const std::string& line) {
  std::istringstream words(line);
  const std::string command = word(words);
  if (command == "plateau") {
    return plateau(words);
  }
  if (command == "ema") {
    return ema(words);
  }
  if (command == "clip") {
    return clip(words);
  }
  const double peak = number(words);
  if (command == "cosine" || command == "linear") {
    const int64_t warmup = count(words), total = count(words);
    const double floor = number(words);
    return command == "cosine" ? rates(snug::WarmupCosine{peak, warmup, total, floor}, count(words))
                               : rates(snug::WarmupLinear{peak, warmup, total, floor}, count(words));
  }
  if (command == "constant") {
    const int64_t warmup = count(words);
    return rates(snug::WarmupConstant{peak, warmup}, count(words));
  }
  if (command == "step") {
    const int64_t every = count(words);
    const double gamma = number(words);
    return rates(snug::StepDecay{peak, every, gamma}, count(words));
  }
  if (command == "one_cycle") {
    snug::OneCycle cycle{.peak = peak, .total_steps = count(words)};
    cycle.pct_start = number(words);
    cycle.anneal = word(words) == "cos" ? snug::OneCycle::Anneal::Cosine : snug::OneCycle::Anneal::Linear;
    cycle.div_factor = number(words);
    cycle.final_div_factor = number(words);
    return rates(cycle, count(words));
  }
  throw std::invalid_argument("unknown command " + command);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << answer(line) << "\n";
  }
}
