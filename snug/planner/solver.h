#pragma once
// PlanSolver: the fastest plan it can find whose peak stays within a number of bytes, for any graph of operators. A
// storage is kept, rebuilt, or, where the profile has a link, offloaded.
//
//   snug::PlanSolver solver(simulator);
//   auto answer = solver.solve(64 << 20);      // a RematPlan, or Infeasible with the number that would do
//
// The same profile and the same calls give the same plans on every machine: work is limited by counts, not by time.

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "snug/planner/plan.h"

namespace snug::plan {

struct Infeasible {
  int64_t smallest_feasible_bytes = 0;  ///< the smallest peak of any plan that was found
};

/// A plan within the budget, or the smallest budget for which there is one.
using PlanAnswer = std::variant<RematPlan, Infeasible>;

struct SolverOptions {
  int64_t work = 9'000'000;  ///< events, and operators replayed, that are simulated per budget
};

class PlanSolver {
 public:
  /// Keeps a reference to the simulator.
  explicit PlanSolver(const StepSimulator& simulator, SolverOptions options = {});
  ~PlanSolver();
  PlanSolver(PlanSolver&&) noexcept;

  /// The fastest plan found so far, in this call or an earlier one, that fits into `budget` bytes.
  PlanAnswer solve(int64_t budget);

  /// One answer per budget: a larger budget never has a slower plan. Any order.
  std::vector<PlanAnswer> curve(std::vector<int64_t> budgets);

  /// The most frugal plan that it can find by bytes alone: another profile of the same step, whose times are a little
  /// different, has the same one, so its bytes can be told to people. solve() knows of it afterwards, and may find a
  /// faster one that takes no more.
  RematPlan smallest();

  /// How many plans it has simulated so far.
  int64_t simulations() const;
  /// Of all simulations, and of estimates of what a rebuild takes: see Simulation.
  int64_t steps() const;

 private:
  class Search;
  std::unique_ptr<Search> search_;
};

}  // namespace snug::plan
