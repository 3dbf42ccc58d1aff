#pragma once
// Descent: from a plan that overflows to a plan that fits, change by change. Internal to planner.

#include <cstdint>
#include <optional>
#include <vector>

#include "src/planner/plan_pool.h"
#include "src/planner/storage_uses.h"

namespace snug::detail {

/// Brings a plan down to a budget.
class Descent {
 public:
  /// Keeps references.
  Descent(const plan::StepSimulator& simulator, const StorageUses& uses, PlanPool& pool);

  /// Estimate of the time of transfers. Only simulation tells how long the step waits for a stream.
  enum class Transfers {
    Waited,  ///< The step waits for each transfer.
    Hidden,  ///< A stream costs nothing.
  };

  /// Changes the plan until the plan fits, no change helps, or the pool's work is used up.
  PlanPoint run(PlanPoint from, int64_t budget, Transfers transfers);

 private:
  struct Candidate {
    int storage;
    plan::Stay choice;  // the cheaper Stay: to be rebuilt once, or to leave
    bool can_be_rebuilt;
  };

  std::vector<Candidate> candidates(const PlanPoint& point, int64_t budget, Transfers transfers);
  std::optional<double> seconds_to_rebuild(int storage, const plan::Stays& plan, std::vector<int>& seen);
  std::optional<PlanPoint> best_change(const PlanPoint& from, int64_t budget, Transfers transfers);

  const plan::StepSimulator& simulator_;
  const StepProfile& profile_;
  const StorageUses& uses_;
  PlanPool& pool_;
};

}  // namespace snug::detail
