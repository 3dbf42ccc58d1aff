#pragma once
// PlanCurve: what a step costs under every budget, from plain training down to the fewest bytes with which it can still
// be done.
//
//   snug::PlanCurve curve = snug::plan_curve(simulator);
//   std::cout << curve.table();

#include <cstdint>
#include <string>
#include <vector>

#include "snug/planner/solver.h"

namespace snug::plan {

struct PlanCurve {
  /// Plain training first; then ever fewer bytes and never fewer seconds.
  std::vector<RematPlan> points = {};

  /// Predicted, of the most frugal plan that was found: a smaller budget is refused.
  int64_t smallest_feasible_bytes() const { return points.back().peak_bytes; }

  /// The fastest point within `budget` bytes; null if there is none.
  const RematPlan* within(int64_t budget) const;

  /// For people: a line for each point with its bytes, its time, and how far it can be from the best.
  std::string table() const;

  friend bool operator==(const PlanCurve&, const PlanCurve&) = default;
};

struct CurveOptions {
  int points = 10;  ///< budgets that are tried, in equal steps; at least 2. Equal answers become one point.
  /// Work for each of them: less than a search alone takes, since each begins with the plans of the others.
  SolverOptions solver = {.work = 4'000'000};
};

/// Throws ConfigError for fewer than 2 points.
PlanCurve plan_curve(const StepSimulator& simulator, CurveOptions options = {});

}  // namespace snug::plan
