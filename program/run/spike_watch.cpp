#include "program/run/spike_watch.h"

#include <algorithm>
#include <cmath>
#include <locale>
#include <sstream>
#include <vector>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {
namespace {

constexpr double kDeviations = 6, kLeastDeviation = 0.01, kExplosion = 10;
constexpr double kQuartiles = 1.349;  // standard deviations between the quartiles of a normal distribution

}  // namespace

std::string SpikeWatch::judge(double loss, double grad_norm) {
  if (!std::isfinite(loss) || !std::isfinite(grad_norm)) {
    return fmt::format("the loss is {}, the gradients' norm {}", loss, grad_norm);
  }
  if (window_.size() >= kLeast) {
    std::vector<double> losses;
    double largest = 0;
    for (const Step& step : window_) {
      losses.push_back(step.loss);
      largest = std::max(largest, step.grad_norm);
    }
    std::sort(losses.begin(), losses.end());
    const size_t count = losses.size();
    const double middle = losses[count / 2], spread = losses[3 * count / 4] - losses[count / 4];
    const double deviation = std::max(spread / kQuartiles, kLeastDeviation * std::abs(middle));
    if (loss > middle + kDeviations * deviation) {
      return fmt::format("the loss is {:.4g}; the {} steps before have a median of {:.4g}, and a deviation of {:.2g}",
                         loss, window_.size(), middle, deviation);
    }
    if (largest > 0 && grad_norm > kExplosion * largest) {
      return fmt::format("the gradients' norm is {:.4g}; that of the {} steps before is at most {:.4g}", grad_norm,
                         window_.size(), largest);
    }
  }
  window_.push_back({loss, grad_norm});
  if (window_.size() > kWindow) {
    window_.pop_front();
  }
  return {};
}

std::string SpikeWatch::numbers() const {
  std::string text;
  for (const Step& step : window_) {
    text += fmt::format("{}{} {}", text.empty() ? "" : " ", step.loss, step.grad_norm);  // read back bit for bit
  }
  return text;
}

void SpikeWatch::restore(const std::string& numbers) {
  std::deque<Step> window;
  std::istringstream in(numbers);
  in.imbue(std::locale::classic());
  for (Step step; in >> step.loss >> step.grad_norm;) {
    window.push_back(step);
  }
  if (!in.eof() || window.size() > kWindow) {
    throw ConfigError("train: the snapshot's last losses are none; resume from another one");
  }
  window_ = std::move(window);
}

}  // namespace snug::detail
