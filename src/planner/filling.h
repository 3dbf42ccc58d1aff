#pragma once
// Filling: from a plan that fits to a faster plan that fits. Internal to planner.

#include <cstdint>
#include <vector>

#include "src/planner/pool.h"
#include "src/planner/storage_uses.h"

namespace snug::plan {

/// Uses the bytes that a plan leaves free.
class Filling {
 public:
  /// Keeps references.
  Filling(const Simulator& simulator, const StorageUses& uses, Pool& pool);

  /// Keeps storages in the free bytes, many storages at once, the best first. A plan that fits becomes a plan that fits
  /// and is not slower. Any other plan is returned unchanged.
  Point fill(Point from, int64_t budget);

  /// Tries each single change, and then swaps of two storages, until no change helps, or at most `limit` of the pool's
  /// work is left. `from` may overflow.
  Point polish(Point from, int64_t budget, int64_t limit);

 private:
  struct Gain {
    double value;  // saved seconds for each byte
    int storage;
    Stay choice;
    int first;  // first and last event of the additional time in memory
    int last;
  };

  std::vector<Gain> gains(const Point& point) const;
  std::vector<bool> matter(const Point& point) const;
  bool improve(Point& best, const Stays& plan, int64_t budget);
  bool change_one(Point& best, int64_t budget, int64_t limit);
  bool swap_two(Point& best, int64_t budget, int64_t limit);

  const Simulator& simulator_;
  const Profile& profile_;
  const StorageUses& uses_;
  Pool& pool_;
  std::vector<int> choices_;             // storages that a plan can treat in several ways
  std::vector<std::vector<Stay>> ways_;  // per storage: the Stays that a plan may choose
};

}  // namespace snug::plan
