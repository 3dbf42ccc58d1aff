#pragma once
// Solver: the fastest plan that the search finds with a peak within a number of bytes, for any graph of operators.
// A storage is kept, rebuilt, or, if the profile has a link, offloaded. The same profile and the same calls give the
// same plans on every machine: counts limit the work, not time.
//
//   plan::Solver solver(simulator);
//   auto answer = solver.solve(64 << 20);      // a Solution, or Infeasible with the smallest peak that was found

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <variant>
#include <vector>

#include "src/planner/descent.h"
#include "src/planner/filling.h"
#include "src/planner/pool.h"
#include "src/planner/segment_plans.h"
#include "src/planner/simulator.h"
#include "src/planner/solution.h"
#include "src/planner/storage_uses.h"

namespace snug::plan {

/// No plan was found within the budget.
struct Infeasible {
  int64_t smallest_feasible_bytes = 0;  ///< the smallest peak of any plan that was found
};

/// A plan within the budget, or the smallest budget for which a plan was found.
using Answer = std::variant<Solution, Infeasible>;

/// The work of a search.
struct SolverOptions {
  /// Events, and operators replayed, that are simulated for each budget. Replayed operators count twice. The default
  /// was chosen to plan a model of 48 blocks in less than a second.
  int64_t work = 9'000'000;
};

/// Searches plans of a step. Plans found for a budget are candidates for every later budget.
class Solver {
 public:
  /// Keeps a reference to the simulator.
  explicit Solver(const Simulator& simulator, SolverOptions options = {});
  Solver(const Solver&) = delete;
  Solver& operator=(const Solver&) = delete;

  /// The fastest plan within `budget` bytes that was found in this call or in an earlier call. A repeated call is
  /// answered without another search, unless smallest() has found a plan within `budget` in between.
  Answer solve(int64_t budget);

  /// Later calls of solve() do the work of `options`, for earlier budgets too. What is known so far is kept.
  void search_longer(SolverOptions options);

  /// From now on, `plan` is the answer for `budget`, without a search, unless a faster plan within `budget` is found
  /// for another budget. `plan` must be possible, with a peak within `budget`.
  void accept(const Stays& plan, int64_t budget);

  /// An answer for each budget. Budgets may have any order, and answers have the same order. A larger budget never has
  /// a slower plan.
  std::vector<Answer> curve(std::vector<int64_t> budgets);

  /// The plan of the fewest bytes that a search by bytes alone finds. Measured times have no influence: another profile
  /// of the same step, with slightly different times, has the same smallest plan, so messages to people may name the
  /// plan's bytes. Later calls of solve() consider the plan, and may find a faster plan that takes no more bytes.
  Solution smallest();

  /// Number of plans simulated so far.
  int64_t simulations() const { return pool_.simulations(); }
  /// Steps of all simulations (see Simulation), and of estimates of the time of rebuilds.
  int64_t steps() const { return pool_.steps(); }

 private:
  static constexpr int64_t kSimulations = 1'000;  // times of small graphs gain next to nothing from more
  void search(int64_t budget, int64_t simulations = kSimulations);
  Answer answer(int64_t budget);
  std::vector<Point> first_plans(int64_t budget);
  Stays smallest_of_these_times();
  Solution plan_of(const Stays& stays, double seconds, int64_t peak, int64_t budget);
  double bound_within(int64_t budget);

  const Simulator& simulator_;
  SolverOptions options_;
  const StorageUses uses_;
  Pool pool_;
  Descent descent_;
  Filling filling_;
  std::optional<SegmentPlans> segment_plans_;  // made by the first search
  std::map<int64_t, double> bounds_;           // by budget, for all budgets that were asked for
  std::optional<Stays> smallest_;              // the answer of smallest()
  std::set<int64_t> searched_;                 // budgets for which nothing new has come since the search
};

}  // namespace snug::plan
