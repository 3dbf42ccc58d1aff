#include "snug/optim/plateau.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include "snug/core/error.h"

namespace snug {
namespace {

constexpr const char* kBest = "best";
constexpr const char* kBad = "num_bad_epochs";
constexpr const char* kCooldown = "cooldown_counter";

template <class Value>
void require(bool fine, const char* field, Value value, const char* cure) {
  if (!fine) {
    throw ConfigError(fmt::format("ReduceOnPlateau: {} is {}; {}", field, value, cure));
  }
}

void check(const PlateauOptions& o) {
  using Options = PlateauOptions;
  constexpr const char* kNotNegative = "give a finite number, at least 0";
  require(o.mode == Options::Mode::Min || o.mode == Options::Mode::Max, "mode", static_cast<int>(o.mode),
          "give Min or Max");
  require(o.threshold_mode == Options::Threshold::Relative || o.threshold_mode == Options::Threshold::Absolute,
          "threshold_mode", static_cast<int>(o.threshold_mode), "give Relative or Absolute");
  require(o.factor > 0 && o.factor < 1, "factor", o.factor, "give a factor above 0 and below 1");
  require(o.patience >= 0, "patience", o.patience, kNotNegative);
  require(o.cooldown >= 0, "cooldown", o.cooldown, kNotNegative);
  require(std::isfinite(o.threshold) && o.threshold >= 0, "threshold", o.threshold, kNotNegative);
  require(std::isfinite(o.min_lr) && o.min_lr >= 0, "min_lr", o.min_lr, kNotNegative);
  require(std::isfinite(o.eps) && o.eps >= 0, "eps", o.eps, kNotNegative);
}

int64_t count(const StateDict& state, const char* name) {
  const int64_t value = state.get<int64_t>(name);
  if (value < 0) {
    throw CorruptFile(fmt::format("ReduceOnPlateau.load_state_dict: {} is {}; it is a count, at least 0", name, value));
  }
  return value;
}

}  // namespace

ReduceOnPlateau::ReduceOnPlateau(torch::optim::Optimizer& optimizer, PlateauOptions options)
    : optimizer_(&optimizer),
      options_(options),
      best_(options.mode == PlateauOptions::Mode::Min ? std::numeric_limits<double>::infinity()
                                                      : -std::numeric_limits<double>::infinity()) {
  check(options_);
}

bool ReduceOnPlateau::is_better(double metric) const {
  const bool relative = options_.threshold_mode == PlateauOptions::Threshold::Relative;
  if (options_.mode == PlateauOptions::Mode::Min) {
    return metric < (relative ? best_ * (1 - options_.threshold) : best_ - options_.threshold);
  }
  return metric > (relative ? best_ * (options_.threshold + 1) : best_ + options_.threshold);
}

bool ReduceOnPlateau::step(double metric) {
  if (is_better(metric)) {
    best_ = metric;
    bad_ = 0;
  } else {
    ++bad_;
  }
  if (cooldown_ > 0) {
    --cooldown_;
    bad_ = 0;
  }
  if (bad_ <= options_.patience) {
    return false;
  }
  reduce();
  cooldown_ = options_.cooldown;
  bad_ = 0;
  return true;
}

void ReduceOnPlateau::reduce() {
  for (auto& group : optimizer_->param_groups()) {
    const double before = group.options().get_lr();
    const double after = std::max(before * options_.factor, options_.min_lr);
    if (before - after > options_.eps) {
      group.options().set_lr(after);
    }
  }
}

StateDict ReduceOnPlateau::state_dict() const {
  StateDict state;
  state.set(kBest, best_);
  state.set(kBad, bad_);
  state.set(kCooldown, cooldown_);
  return state;
}

void ReduceOnPlateau::load_state_dict(const StateDict& state) {
  const double best = state.get<double>(kBest);
  const int64_t bad = count(state, kBad);
  const int64_t cooldown = count(state, kCooldown);
  best_ = best;
  bad_ = bad;
  cooldown_ = cooldown;
}

}  // namespace snug
