#pragma once
// Filling: from a plan that fits to a faster plan that fits. Internal to planner.

#include <cstdint>
#include <vector>

#include "src/planner/plan_pool.h"
#include "src/planner/storage_uses.h"

namespace snug::detail {

/// Uses the bytes that a plan leaves free.
class Filling {
 public:
  /// Keeps references.
  Filling(const plan::StepSimulator& simulator, const StorageUses& uses, PlanPool& pool);

  /// Keeps storages in the free bytes, many storages at once, the best first. A plan that fits becomes a plan that fits
  /// and is not slower. Any other plan is returned unchanged.
  PlanPoint fill(PlanPoint from, int64_t budget);

  /// Tries each single change, and then swaps of two storages, until no change helps, or at most `limit` of the pool's
  /// work is left. `from` may overflow.
  PlanPoint polish(PlanPoint from, int64_t budget, int64_t limit);

 private:
  struct Gain {
    double value;  // saved seconds for each byte
    int storage;
    plan::Stay choice;
    int first;  // first and last event of the additional time in memory
    int last;
  };

  std::vector<Gain> gains(const PlanPoint& point) const;
  bool improve(PlanPoint& best, const plan::Stays& plan, int64_t budget);
  bool change_one(PlanPoint& best, int64_t budget, int64_t limit);
  bool swap_two(PlanPoint& best, int64_t budget, int64_t limit);

  const plan::StepSimulator& simulator_;
  const StepProfile& profile_;
  const StorageUses& uses_;
  PlanPool& pool_;
  std::vector<int> choices_;                   // storages that a plan can treat in several ways
  std::vector<std::vector<plan::Stay>> ways_;  // per storage: the Stays that a plan may choose
};

}  // namespace snug::detail
