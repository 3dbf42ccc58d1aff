#include "snug/optim/schedule.h"

#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include "snug/core/error.h"

namespace snug {
namespace {

void require(bool fine, const char* what, double value, const char* cure) {
  if (!fine) {
    throw ConfigError(fmt::format("{} is {}; {}", what, value, cure));
  }
}

void require_count(bool fine, const char* what, int64_t value, const char* cure) {
  if (!fine) {
    throw ConfigError(fmt::format("{} is {}; {}", what, value, cure));
  }
}

bool is_positive(double value) { return std::isfinite(value) && value > 0; }

}  // namespace

void WarmupCosine::check() const {
  require(is_positive(peak), "WarmupCosine: peak", peak, "give a finite learning rate above 0");
  require(floor >= 0 && floor <= peak, "WarmupCosine: floor", floor, "give a learning rate from 0 to peak");
  require_count(total_steps >= 1, "WarmupCosine: total_steps", total_steps, "give the length of the run, at least 1");
  require_count(warmup_steps >= 0 && warmup_steps <= total_steps, "WarmupCosine: warmup_steps", warmup_steps,
                "give a number from 0 to total_steps");
}

double WarmupCosine::at(int64_t step) const {
  check();
  require_count(step >= 0, "WarmupCosine.at: step", step, "optimizer steps are counted from 0");
  if (step < warmup_steps) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  }
  if (step >= total_steps) {
    return floor;
  }
  const double t = static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps);
  return floor + (peak - floor) * (1 + std::cos(std::numbers::pi * t)) / 2;
}

double scale_learning_rate(double base_lr, int64_t batch, int64_t base_batch, LrScaling scaling) {
  require(is_positive(base_lr), "scale_learning_rate: base_lr", base_lr, "give a finite learning rate above 0");
  require_count(batch >= 1, "scale_learning_rate: batch", batch, "give the items per optimizer step, at least 1");
  require_count(base_batch >= 1, "scale_learning_rate: base_batch", base_batch,
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
