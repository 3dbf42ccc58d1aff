#pragma once
// Descent: from a plan that overflows to a plan that fits, change by change. Internal to planner.

#include <cstdint>
#include <optional>
#include <vector>

#include "src/planner/pool.h"
#include "src/planner/storage_uses.h"

namespace snug::plan {

/// Brings a plan down to a budget.
class Descent {
 public:
  /// Keeps references.
  Descent(const Simulator& simulator, const StorageUses& uses, Pool& pool);

  /// Estimate of the time of transfers. Only simulation tells how long the step waits for a stream.
  enum class Transfers {
    Waited,  ///< The step waits for each transfer.
    Hidden,  ///< A stream costs nothing.
  };

  /// Changes the plan until the plan fits, no change helps, or the pool's work is used up.
  Point run(Point from, int64_t budget, Transfers transfers);

 private:
  struct Candidate {
    int storage;
    Stay choice;  // the cheaper Stay: to be rebuilt once, or to leave
    bool can_be_rebuilt;
    double most;  // no change of the storage takes away more of the overflow
  };

  std::vector<Candidate> candidates(const Point& point, int64_t budget, Transfers transfers);
  std::optional<double> seconds_to_rebuild(int storage, const Stays& plan, std::vector<int>& seen);
  double least_seconds(int storage, Stay stay, Stay choice) const;
  std::optional<Point> best_change(const Point& from, int64_t budget, Transfers transfers);

  const Simulator& simulator_;
  const Profile& profile_;
  const StorageUses& uses_;
  Pool& pool_;
};

}  // namespace snug::plan
