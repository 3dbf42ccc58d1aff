#pragma once
// Filling: from a plan that fits to a faster one that fits. Internal to planner.

#include <cstdint>
#include <vector>

#include "src/planner/plan_pool.h"
#include "src/planner/storage_uses.h"

namespace snug::detail {

class Filling {
 public:
  /// Keeps references.
  Filling(const plan::StepSimulator& simulator, const StorageUses& uses, PlanPool& pool);

  /// Keeps what there is room for, best first, many storages at once.
  PlanPoint fill(PlanPoint from, int64_t budget);

  /// Tries each single change, and then swaps, until none helps or no more work than `limit` is left. `from` may
  /// overflow.
  PlanPoint polish(PlanPoint from, int64_t budget, int64_t limit);

 private:
  struct Gain {
    double value;  // seconds saved for each byte
    int storage;
    plan::Stay choice;
    int first;  // events in which it is there in addition
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
  std::vector<int> choices_;                   // storages that a plan can treat in more than one way
  std::vector<std::vector<plan::Stay>> ways_;  // per storage: to treat it
};

}  // namespace snug::detail
