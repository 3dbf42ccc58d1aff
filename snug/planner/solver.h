#pragma once
// PlanSolver: the fastest plan it can find whose peak stays within a number of bytes, for any graph of operators. A storage is kept, rebuilt, or,
// where the profile has a link, offloaded.
//
//   snug::PlanSolver solver(simulator);
//   auto answer = solver.solve(64 << 20);      // a RematPlan, or Infeasible with the number that would do
//
// The same profile and the same calls give the same plans on every machine: work is limited by counts, not by time.

#include <cstdint>
#include <map>
#include <optional>
#include <variant>
#include <vector>

#include "snug/planner/plan.h"

namespace snug::plan {

struct Infeasible {
  int64_t smallest_feasible_bytes = 0;  ///< the smallest peak of any plan that was found
};

using PlanAnswer = std::variant<RematPlan, Infeasible>;

struct SolverOptions {
  int64_t work = 9'000'000;  ///< events, and operators replayed, that are simulated per budget
};

class PlanSolver {
 public:
  /// Keeps a reference to the simulator.
  explicit PlanSolver(const StepSimulator& simulator, SolverOptions options = {});

  /// The fastest plan found so far, in this call or an earlier one, that fits into `budget` bytes.
  PlanAnswer solve(int64_t budget);

  /// One answer per budget: a larger budget never has a slower plan. Any order.
  std::vector<PlanAnswer> curve(std::vector<int64_t> budgets);

  /// The most frugal plan that it can find by bytes alone: another profile of the same step, whose times are a little different, has the
  /// same one, so its bytes can be told to people. solve() knows of it afterwards, and may find a faster one that takes no more.
  RematPlan smallest();

  int64_t simulations() const { return simulations_; }
  /// Of all simulations, and of estimates of what a rebuild takes: see Simulation.
  int64_t steps() const { return steps_; }

 private:
  struct Point;
  struct Candidate {
    int storage;
    Stay choice;  // the cheaper one: Stay::once_rebuilt() or Stay::offloaded()
    bool can_be_rebuilt;
  };

  Stays smallest_of_these_times();
  Point evaluate(const Stays& plan, int64_t budget);
  void remember(const Point& point);
  PlanAnswer answer(int64_t budget) const;
  RematPlan plan_of(const Stays& stays, double seconds, int64_t peak, int64_t budget) const;
  void try_chain_plans(int64_t budget);
  Point descend(Point from, int64_t budget);
  Point climb(Point from, int64_t budget, int64_t limit);
  bool try_change(Point& best, const Stays& plan, int64_t budget);
  std::vector<Candidate> candidates(const Point& point, int64_t budget) const;
  std::optional<double> seconds_to_rebuild(int storage, const Stays& plan, std::vector<int>& seen) const;
  bool may_leave(int storage) const { return ways_[static_cast<size_t>(storage)].back() == Stay::offloaded(); }

  const StepSimulator& simulator_;
  SolverOptions options_;
  std::vector<int> dropped_at_;  // per storage: the event where the program lets go of it
  std::vector<int> unpacked_at_;
  std::vector<std::vector<Stay>> ways_;                         // per storage: to treat it
  std::vector<int> choices_;                                    // storages that a plan can treat in more than one way
  std::map<int64_t, std::pair<double, Stays>> found_;           // by peak; slower ones of a larger peak are left out
  std::optional<std::vector<std::vector<Stays>>> chain_plans_;  // made when first asked for
  int64_t simulations_ = 0;
  mutable int64_t steps_ = 0;
  int64_t work_left_ = 0;
};

}  // namespace snug::plan

namespace snug {  // their names of before, for one release

using plan::Infeasible;
using plan::PlanAnswer;
using plan::PlanSolver;
using plan::SolverOptions;

}  // namespace snug
