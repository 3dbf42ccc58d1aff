#include "snug/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include "snug/core/error.h"

namespace snug {
namespace {

template <class Value>
void require(bool fine, const char* name, const char* field, Value value, const char* cure) {
  if (!fine) {
    throw ConfigError(fmt::format("{}: {} is {}; {}", name, field, value, cure));
  }
}

bool is_positive(double value) { return std::isfinite(value) && value > 0; }

void require_step(const char* name, int64_t step) {
  if (step < 0) {
    throw ConfigError(fmt::format("{}.at: step is {}; optimizer steps are counted from 0", name, step));
  }
}

template <class Schedule>
void check_warm_up_and_decay(const Schedule& s, const char* name) {
  require(is_positive(s.peak), name, "peak", s.peak, "give a finite learning rate above 0");
  require(s.floor >= 0 && s.floor <= s.peak, name, "floor", s.floor, "give a learning rate from 0 to peak");
  require(s.total_steps >= 1, name, "total_steps", s.total_steps, "give the length of the run, at least 1");
  require(s.warmup_steps >= 0 && s.warmup_steps <= s.total_steps, name, "warmup_steps", s.warmup_steps,
          "give a number from 0 to total_steps");
}

double warm_up(double peak, int64_t step, int64_t warmup_steps) {
  return peak * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
}

}  // namespace

void WarmupCosine::check() const { check_warm_up_and_decay(*this, "WarmupCosine"); }

double WarmupCosine::at(int64_t step) const {
  check();
  require_step("WarmupCosine", step);
  if (step < warmup_steps) {
    return warm_up(peak, step, warmup_steps);
  }
  if (step >= total_steps) {
    return floor;
  }
  // Python's order of operations: near the end, 1 + cos loses the digits in which another order would differ.
  const double angle =
      std::numbers::pi * static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps);
  return floor + (peak - floor) * (1 + std::cos(angle)) / 2;
}

void WarmupLinear::check() const { check_warm_up_and_decay(*this, "WarmupLinear"); }

double WarmupLinear::at(int64_t step) const {
  check();
  require_step("WarmupLinear", step);
  if (step < warmup_steps) {
    return warm_up(peak, step, warmup_steps);
  }
  if (step >= total_steps) {
    return floor;
  }
  const double t = static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps);
  return peak + (floor - peak) * t;
}

void WarmupConstant::check() const {
  require(is_positive(peak), "WarmupConstant", "peak", peak, "give a finite learning rate above 0");
  require(warmup_steps >= 0, "WarmupConstant", "warmup_steps", warmup_steps, "give a number of steps, at least 0");
}

double WarmupConstant::at(int64_t step) const {
  check();
  require_step("WarmupConstant", step);
  return step < warmup_steps ? warm_up(peak, step, warmup_steps) : peak;
}

void StepDecay::check() const {
  require(is_positive(initial), "StepDecay", "initial", initial, "give a finite learning rate above 0");
  require(every >= 1, "StepDecay", "every", every, "give the steps between two reductions, at least 1");
  require(gamma > 0 && gamma <= 1, "StepDecay", "gamma", gamma, "give a factor above 0 and at most 1");
}

double StepDecay::at(int64_t step) const {
  check();
  require_step("StepDecay", step);
  return initial * std::pow(gamma, static_cast<double>(step / every));
}

void OneCycle::check() const {
  require(is_positive(peak), "OneCycle", "peak", peak, "give a finite learning rate above 0");
  require(total_steps >= 1, "OneCycle", "total_steps", total_steps, "give the length of the cycle, at least 1");
  require(pct_start >= 0 && pct_start <= 1, "OneCycle", "pct_start", pct_start, "give a share from 0 to 1");
  require(anneal == Anneal::Cosine || anneal == Anneal::Linear, "OneCycle", "anneal", static_cast<int>(anneal),
          "give Cosine or Linear");
  require(is_positive(div_factor), "OneCycle", "div_factor", div_factor, "give a finite divisor above 0");
  require(is_positive(final_div_factor), "OneCycle", "final_div_factor", final_div_factor,
          "give a finite divisor above 0");
}

double OneCycle::at(int64_t step) const {
  check();
  require_step("OneCycle", step);
  const double first = peak / div_factor;
  const double last = first / final_div_factor;
  const auto last_step = static_cast<double>(total_steps - 1);
  const double top_step = pct_start * static_cast<double>(total_steps) - 1;
  const double now = std::min(static_cast<double>(step), last_step);
  const auto between = [this](double start, double end, double t) {
    return anneal == Anneal::Linear ? (end - start) * t + start
                                    : end + (start - end) / 2 * (std::cos(std::numbers::pi * t) + 1);
  };
  if (now <= top_step) {
    return top_step == 0 ? peak : between(first, peak, now / top_step);
  }
  // Below 0, top_step means that there is no rise: as in Python, the fall has begun before step 0.
  return between(peak, last, (now - top_step) / (last_step - top_step));
}

double scale_learning_rate(double base_lr, int64_t batch, int64_t base_batch, LrScaling scaling) {
  require(is_positive(base_lr), "scale_learning_rate", "base_lr", base_lr, "give a finite learning rate above 0");
  require(batch >= 1, "scale_learning_rate", "batch", batch, "give the items per optimizer step, at least 1");
  require(base_batch >= 1, "scale_learning_rate", "base_batch", base_batch,
          "give the batch size that base_lr was tuned for, at least 1");
  const double ratio = static_cast<double>(batch) / static_cast<double>(base_batch);
  switch (scaling) {
    case LrScaling::None:
      return base_lr;
    case LrScaling::Linear:
      return base_lr * ratio;
    case LrScaling::Sqrt:
      return base_lr * std::sqrt(ratio);
  }
  throw ConfigError(
      fmt::format("scale_learning_rate: scaling is {}; give None, Linear or Sqrt", static_cast<int>(scaling)));
}

}  // namespace snug
