// The schedule and Ema driven line by line, so that a script can compare them with Python. One
// command per line of stdin, one answer per line of stdout. Floats go as hexadecimal (the strtod and float.hex
// notation), so none is rounded.
//
//   cosine PEAK WARMUP TOTAL FLOOR STEPS                    the rates of steps 0 to STEPS - 1
//   ema DECAY fp32|bf16 UPDATES WEIGHTS...                  the average of UPDATES rows of weights

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "snug/extra/ema.h"
#include "snug/schedule.h"

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

std::string cosine(std::istream& words) {
  const double peak = number(words);
  const int64_t warmup = count(words), total = count(words);
  const snug::WarmupCosine schedule{peak, warmup, total, number(words)};
  const int64_t steps = count(words);
  std::vector<double> rates;
  for (int64_t step = 0; step < steps; ++step) {
    rates.push_back(schedule.at(step));
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

std::string answer(const std::string& line) {
  std::istringstream words(line);
  const std::string command = word(words);
  if (command == "ema") {
    return ema(words);
  }
  if (command == "cosine") {
    return cosine(words);
  }
  throw std::invalid_argument("unknown command " + command);
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << answer(line) << "\n";
  }
}
