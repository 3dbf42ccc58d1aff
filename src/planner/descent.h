#pragma once
// Descent: from a plan that overflows to one that fits, change by change. Internal to planner.

#include <cstdint>
#include <optional>
#include <vector>

#include "src/planner/plan_pool.h"
#include "src/planner/storage_uses.h"

namespace snug::detail {

class Descent {
 public:
  /// Keeps references.
  Descent(const plan::StepSimulator& simulator, const StorageUses& uses, PlanPool& pool);

  /// How transfers are estimated. Simulation tells how much of a stream the step waits for.
  enum class Transfers {
    Waited,  ///< The step waits for each transfer.
    Hidden,  ///< A stream costs nothing.
  };

  /// Ends where the plan fits, or no change helps.
  PlanPoint run(PlanPoint from, int64_t budget, Transfers transfers);

 private:
  struct Candidate {
    int storage;
    plan::Stay choice;  // the cheaper one: to be rebuilt once, or to leave
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
