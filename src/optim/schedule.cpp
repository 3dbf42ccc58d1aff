#include "snug/schedule.h"

#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug {
namespace {

template <class Value>
void require(bool fine, const char* name, const char* field, Value value, const char* cure) {
  if (!fine) {
    throw ConfigError(fmt::format("{}: {} is {}; {}", name, field, value, cure));
  }
}

bool is_positive(double value) { return std::isfinite(value) && value > 0; }

}  // namespace

void WarmupCosine::check() const {
  const char* name = "WarmupCosine";
  require(is_positive(peak), name, "peak", peak, "give a finite learning rate above 0");
  require(floor >= 0 && floor <= peak, name, "floor", floor, "give a learning rate from 0 to peak");
  require(total_steps >= 1, name, "total_steps", total_steps, "give the length of the run, at least 1");
  require(warmup_steps >= 0 && warmup_steps <= total_steps, name, "warmup_steps", warmup_steps,
          "give a number from 0 to total_steps");
}

double WarmupCosine::at(int64_t step) const {
  check();
  if (step < 0) {
    throw ConfigError(fmt::format("WarmupCosine.at: step is {}; optimizer steps are counted from 0", step));
  }
  if (step < warmup_steps) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  }
  if (step >= total_steps) {
    return floor;
  }
  // Python's order of operations: near the end, 1 + cos loses the digits in which another order differs.
  const double angle =
      std::numbers::pi * static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps);
  return floor + (peak - floor) * (1 + std::cos(angle)) / 2;
}

}  // namespace snug
