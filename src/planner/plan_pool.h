#pragma once
// PlanPool: simulates plans, counts that work, and remembers the best. Internal to planner.

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "snug/planner.h"

namespace snug::detail {

struct PlanPoint {
  plan::Stays plan;
  plan::Simulation run;
  double overflow = 0;  ///< bytes above the budget, summed over events

  bool possible() const { return run.impossible < 0 && !run.is_cut_short; }
  bool fits() const { return possible() && overflow == 0; }
};

class PlanPool {
 public:
  using Known = std::map<int64_t, std::pair<double, plan::Stays>>;

  explicit PlanPool(const plan::StepSimulator& simulator);

  PlanPoint evaluate(const plan::Stays& plan, int64_t budget);

  /// By peak: all plans ever simulated, but those that another beats in bytes and in seconds.
  const Known& known() const { return known_; }
  /// The fastest one that fits; end() if none does.
  Known::const_iterator within(int64_t budget) const;

  /// Events, and operators replayed, that may be simulated from now on. A search ends when there are none left.
  void set_work(int64_t work) { work_left_ = work; }
  int64_t work_left() const { return work_left_; }

  int64_t simulations() const { return simulations_; }
  int64_t steps() const { return steps_; }
  void add_steps(int64_t steps) { steps_ += steps; }

 private:
  void remember(const PlanPoint& point);

  const plan::StepSimulator& simulator_;
  const int64_t most_replayed_;
  Known known_;
  int64_t work_left_ = 0;
  int64_t simulations_ = 0;
  int64_t steps_ = 0;
};

}  // namespace snug::detail
