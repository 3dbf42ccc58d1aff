#pragma once
// The learning rate as a pure function of the optimizer step, so that a resumed run needs no schedule state at all.
// Count the steps that were made: where a GradScaler skips some, warm-up and decay still take the given number of
// updates.
//
//   const snug::WarmupCosine schedule{.peak = 3e-4, .warmup_steps = 100, .total_steps = 2000, .floor = 3e-5};
//   for (auto& group : optimizer.param_groups()) {
//     group.options().set_lr(schedule.at(step));                               // step counts from 0
//   }

#include <cstdint>

namespace snug {

/// Linear warm-up from peak / warmup_steps to peak (Goyal et al. 2017, arXiv:1706.02677, section 2.2), then half a
/// cosine period from peak down to floor (one cycle of SGDR: Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5).
struct WarmupCosine {
  double peak = 0;           ///< the highest learning rate, above 0; there is no default that suits every model
  int64_t warmup_steps = 0;  ///< steps with a rising rate, 0: none; 1-5 % of the run calms Adam's noisy first steps
  int64_t total_steps = 0;   ///< the step from which the rate stays at floor; at least 1 and at least warmup_steps
  double floor = 0;          ///< the learning rate at the end, from 0 to peak; a tenth of peak is usual for long runs

  /// The learning rate of optimizer step `step`, counted from 0:
  ///   step < warmup_steps:  peak * (step + 1) / warmup_steps
  ///   step < total_steps:   floor + (peak - floor) * (1 + cos(pi * t)) / 2,
  ///                         t = (step - warmup_steps) / (total_steps - warmup_steps)
  ///   after that:           floor
  /// Throws ConfigError if step is negative, and whatever check() throws.
  double at(int64_t step) const;

  /// Throws ConfigError, with the field and its value, if a field is out of its range.
  void check() const;
};

}  // namespace snug
