#pragma once
// Learning rates as pure functions of the optimizer step, so that a resumed run needs no schedule state at all.
// LrSchedule (lr_schedule.h) puts one into an optimizer.
//
//   snug::WarmupCosine schedule{.peak = 3e-4, .warmup_steps = 100, .total_steps = 2000, .floor = 3e-5};
//   options.lr(schedule.at(step));                                             // step counts from 0
//   double lr = snug::scale_learning_rate(3e-4, 512, 64, LrScaling::Sqrt);     // tuned at batch 64, run at 512

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

/// The same with a straight line from peak down to floor (Devlin et al. 2018, arXiv:1810.04805, appendix A.2).
struct WarmupLinear {
  double peak = 0;           ///< as in WarmupCosine
  int64_t warmup_steps = 0;  ///< as in WarmupCosine
  int64_t total_steps = 0;   ///< as in WarmupCosine
  double floor = 0;          ///< as in WarmupCosine

  /// As WarmupCosine::at, but peak + (floor - peak) * t between warm-up and end.
  double at(int64_t step) const;
  void check() const;
};

/// One rate for good, after an optional warm-up.
struct WarmupConstant {
  double peak = 0;           ///< the learning rate, above 0
  int64_t warmup_steps = 0;  ///< steps with a rising rate, as in WarmupCosine; 0: none

  /// step < warmup_steps: peak * (step + 1) / warmup_steps; after that: peak. Throws as WarmupCosine::at.
  double at(int64_t step) const;
  void check() const;
};

/// The rate times gamma every so many steps (torch.optim.lr_scheduler.StepLR).
struct StepDecay {
  double initial = 0;  ///< the learning rate of the first steps, above 0
  int64_t every = 0;   ///< optimizer steps between two reductions, at least 1
  double gamma = 0.1;  ///< the factor of one reduction, above 0 and at most 1

  /// initial * gamma ^ floor(step / every). Throws as WarmupCosine::at.
  double at(int64_t step) const;
  void check() const;
};

/// Up to the peak and far down again within one run (Smith & Topin 2017, arXiv:1708.07120), with the formulas of
/// torch.optim.lr_scheduler.OneCycleLR (three_phase=False). Of the learning rate only: momentum is left as it is.
struct OneCycle {
  enum class Anneal { Cosine, Linear };

  double peak = 0;                 ///< the highest learning rate, above 0 (max_lr in Python)
  int64_t total_steps = 0;         ///< optimizer steps of the cycle, at least 1
  double pct_start = 0.3;          ///< the share of the steps in which the rate rises, from 0 to 1
  Anneal anneal = Anneal::Cosine;  ///< the shape of both ways
  double div_factor = 25;          ///< the first rate is peak / div_factor; above 0
  double final_div_factor = 1e4;   ///< the last rate is peak / div_factor / final_div_factor; above 0

  /// With top = pct_start * total_steps - 1 and last = total_steps - 1, the rate goes
  ///   from step 0 to top:      from peak / div_factor to peak
  ///   from step top to last:   from peak to peak / div_factor / final_div_factor, where it stays
  /// along half a cosine or a line. Python divides by zero at step 0 where top is 0; here that step has the peak.
  /// Throws as WarmupCosine::at.
  double at(int64_t step) const;
  void check() const;
};

/// How a learning rate that was tuned for one batch size carries over to another.
enum class LrScaling {
  None,    ///< unchanged
  Linear,  ///< times batch / base_batch: SGD (Goyal et al. 2017, arXiv:1706.02677, section 2.1)
  Sqrt,    ///< times sqrt(batch / base_batch): keeps the variance of the update (Krizhevsky 2014, arXiv:1404.5997)
};

/// The learning rate for `batch` items per optimizer step (of all ranks and micro-batches together), given the one
/// that suits `base_batch`. Throws ConfigError unless base_lr is positive and finite and both sizes are at least 1.
double scale_learning_rate(double base_lr, int64_t batch, int64_t base_batch, LrScaling scaling);

}  // namespace snug
