#pragma once
// LrSchedule: sets the learning rate of any torch optimizer as a function of the optimizer step. Steps that a
// GradScaler skips do not count, so warm-up and decay take the given number of updates.
//
//   snug::LrSchedule schedule(optimizer, snug::WarmupCosine{.peak = 3e-4, .warmup_steps = 100, .total_steps = 2000});
//   for (...) {
//     const snug::StepOutcome outcome = scaler.step(optimizer);
//     schedule.step(outcome);
//   }

#include <concepts>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "snug/core/state.h"

namespace torch::optim {
class Optimizer;
}

namespace snug {

/// WarmupCosine (schedule.h), or your own.
template <class T>
concept StepSchedule = requires(const T& schedule) {
  { schedule.at(int64_t{0}) } -> std::convertible_to<double>;
};

/// Sets the learning rate of every parameter group to rate(steps so far) times the group's factor. The factor is the
/// ratio of the group's rate to that of the first group at the construction of the LrSchedule, so groups that began at
/// 1e-3 and 1e-4 stay ten to one.
class LrSchedule {
 public:
  /// `rate`: the learning rate of optimizer step 0, 1, ...; finite and at least 0. The constructor sets the rate of
  /// step 0. Make the LrSchedule before the optimizer's saved state is loaded. It refers to `optimizer`, which must
  /// outlive it. Throws ConfigError if the first group's rate is not above 0, if another's is negative, or if rate(0)
  /// is not a valid rate.
  LrSchedule(torch::optim::Optimizer& optimizer, std::function<double(int64_t)> rate);

  template <StepSchedule Schedule>
  LrSchedule(torch::optim::Optimizer& optimizer, Schedule schedule)
      : LrSchedule(optimizer,
                   std::function<double(int64_t)>([s = std::move(schedule)](int64_t step) { return s.at(step); })) {}

  /// Call it after each optimizer.step. `stepped`: false if that step was skipped; then nothing changes. Throws
  /// ConfigError, and has changed nothing, if the rate is not valid, or if the optimizer's groups have changed.
  void step(bool stepped = true);

  /// Optimizer steps so far, without those that were skipped.
  int64_t steps() const { return steps_; }
  /// The learning rate of the first group, for the next step.
  double lr() const { return lr_; }

  /// The count and the factors; the function itself is not saved. Loading also sets the rates, so it may come before or
  /// after the optimizer's own state. Throws CorruptFile, and has changed nothing, if the state has another number of
  /// groups.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  double checked_rate(int64_t step) const;
  void check_groups() const;
  void set_rates(double rate);

  torch::optim::Optimizer* optimizer_;
  std::function<double(int64_t)> rate_;
  std::vector<double> factors_;
  int64_t steps_ = 0;
  double lr_ = 0;
};

}  // namespace snug
