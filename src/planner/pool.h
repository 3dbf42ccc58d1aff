#pragma once
// Pool: simulates plans, counts the work of simulations, and remembers the best plans. Internal to planner.

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "src/planner/simulator.h"

namespace snug::plan {

/// A plan with its simulation.
struct Point {
  Stays plan;
  Simulation run;
  double overflow = 0;  ///< bytes above the budget, summed over events

  bool possible() const { return run.impossible < 0 && !run.is_cut_short; }
  bool fits() const { return possible() && overflow == 0; }
};

/// All plans of a search go through the pool.
class Pool {
 public:
  using Known = std::map<int64_t, std::pair<double, Stays>>;

  explicit Pool(const Simulator& simulator);

  /// Simulates a plan, takes the simulation from the work left, and remembers the plan if the plan is possible.
  Point evaluate(const Stays& plan, int64_t budget);

  /// By peak: seconds and plan of all plans ever simulated, except plans that another plan beats in bytes and in
  /// seconds.
  const Known& known() const { return known_; }
  /// The fastest remembered plan that fits; end() if no plan fits.
  Known::const_iterator within(int64_t budget) const;

  /// Work that may be done from now on, counted in simulated events plus twice the replayed operators. A search ends
  /// when no work is left.
  void set_work(int64_t work) { work_left_ = work; }
  int64_t work_left() const { return work_left_; }

  /// Number of simulations, and their steps (see Simulation) with the steps of estimates that were added.
  int64_t simulations() const { return simulations_; }
  int64_t steps() const { return steps_; }
  void add_steps(int64_t steps) { steps_ += steps; }

 private:
  void remember(const Point& point);

  const Simulator& simulator_;
  const int64_t most_replayed_;
  Known known_;
  int64_t work_left_ = 0;
  int64_t simulations_ = 0;
  int64_t steps_ = 0;
};

}  // namespace snug::plan
