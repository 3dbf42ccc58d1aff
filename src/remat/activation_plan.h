#pragma once
// The content of an ActivationPlan, and plans that are made from a profile.

#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include <ATen/core/Tensor.h>

#include "snug/core.h"
#include "snug/plan.h"
#include "src/planner/simulator.h"
#include "src/planner/solution.h"
#include "src/planner/solver.h"
#include "src/remat/effect_journal.h"
#include "src/remat/tape_schedule.h"

namespace snug::detail {

/// A profile, and a plan for the profile.
class PlanContent {
 public:
  /// Throws ConfigError if the plan drops a storage that cannot be rebuilt.
  PlanContent(plan::Simulator simulator, plan::Solution solution);

  static ActivationPlan make_plan(plan::Simulator simulator, plan::Solution solution);
  static const PlanContent& of(const ActivationPlan& plan) { return *plan.content_; }

  const plan::Simulator& simulator() const { return simulator_; }
  const plan::Solution& solution() const { return solution_; }

  /// The schedule, made at the first call. A plan can be explained on a machine that cannot run the plan, because the
  /// directory for offloading does not exist.
  std::shared_ptr<const TapeSchedule> schedule() const;
  SaveOnHost::Report offloaded() const;
  /// Predicted. A pass under the plan has a tape, even if the solution keeps everything.
  double seconds() const;

 private:
  const plan::Simulator simulator_;
  const plan::Solution solution_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const TapeSchedule> schedule_;
};

/// The profile from which a plan was made, and the plan's choice for each storage.
inline const plan::Profile& profile_of(const ActivationPlan& plan) {
  return PlanContent::of(plan).simulator().profile();
}
inline const plan::Solution& solution_of(const ActivationPlan& plan) { return PlanContent::of(plan).solution(); }

/// Plans for a profile; `options` limit the search. Unlike plan_activations, does not verify the plan by a run. Throws
/// BudgetExceeded as plan_activations does.
ActivationPlan unverified_plan(const plan::Profile& profile, Bytes budget, plan::SolverOptions options = {});

/// As snug::plan_activations, with a profile of `forward_and_loss` that was taken before, and without the comparison of
/// losses. `found` may be a plan that a search has already found for the profile and the budget: `found` is tried
/// before a new search.
ActivationPlan plan_activations(plan::Profile profile, const std::function<at::Tensor()>& forward_and_loss,
                                Bytes budget, std::optional<plan::Solution> found = {});
/// The same for a caller with an open EffectJournal. The journal takes back the changes of the runs.
ActivationPlan plan_activations(plan::Profile profile, const std::function<at::Tensor()>& forward_and_loss,
                                Bytes budget, std::optional<plan::Solution> found, EffectJournal& journal);

}  // namespace snug::detail
