#pragma once
// Curve: the cost of a step under every budget, from plain training down to the fewest bytes for which a plan was
// found.
//
//   plan::Curve curve = plan::curve(simulator);
//   std::cout << curve.table();

#include <cstdint>
#include <string>
#include <vector>

#include "src/planner/solver.h"

namespace snug::plan {

/// Plans of a step for falling budgets.
struct Curve {
  /// Plain training is the first point. Each later point takes fewer bytes, and never fewer seconds.
  std::vector<Solution> points = {};

  /// Predicted peak of the most frugal plan that was found. A smaller budget is refused.
  int64_t smallest_feasible_bytes() const { return points.back().peak_bytes; }

  /// The fastest point within `budget` bytes; null if no point fits.
  const Solution* within(int64_t budget) const;

  /// A text for people: a line for each point with bytes, time, and the largest possible distance from the best plan.
  std::string table() const;

  friend bool operator==(const Curve&, const Curve&) = default;
};

struct CurveOptions {
  int points = 10;  ///< budgets that are tried, in equal steps; at least 2. Equal answers become a single point.
  /// Work for each budget. The default is less than the default of a single search, because the search for each budget
  /// begins with the plans of the budgets before.
  SolverOptions solver = {.work = 4'000'000};
};

/// The curve of a step. Throws ConfigError for fewer than 2 points.
Curve curve(const Simulator& simulator, CurveOptions options = {});

}  // namespace snug::plan
