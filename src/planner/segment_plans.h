#pragma once
// SegmentPlans: plans that cut the step into segments, for a budget. Internal to planner.

#include <cstdint>
#include <optional>
#include <vector>

#include "src/planner/pool.h"
#include "src/planner/segments.h"

namespace snug::plan {

/// Makes the tables of segments once, and reads plans for any budget from them.
class SegmentPlans {
 public:
  /// Keeps references.
  SegmentPlans(const Simulator& simulator, const StorageUses& uses, Pool& pool);

  /// Simulated plans near the budget: plans that fit, and a few that overflow a little, for Descent.
  std::vector<Point> around(int64_t budget);

 private:
  struct Family {
    Segments segments;
    std::vector<Stays> plans;  // estimated bytes ascend
  };

  int first_that_overflows(const Family& family, int64_t budget);
  std::optional<Point> best_near(const Family& family, int number, int64_t budget);
  std::optional<Point> correct(Segments segments, int64_t budget);

  const Simulator& simulator_;
  Pool& pool_;
  std::vector<Family> families_;
};

}  // namespace snug::plan
