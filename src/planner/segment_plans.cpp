#include "src/planner/segment_plans.h"

#include <algorithm>
#include <utility>

#include "src/planner/at.h"
#include "src/planner/segment_table.h"

// SegmentTable finds the best plan of segments for every number of bytes, but by estimated bytes. The simulator knows
// the real bytes. Which of the table's plans is the fastest that really fits?
//
// Simulating all plans of a table is thorough and slow. Trusting the estimates wastes bytes or overflows. Real bytes
// ascend with estimated bytes except for errors of the estimates, so around() simulates a few plans:
//
//   1. A binary search with the simulator finds the first plan of the table that overflows.
//   2. The plans on both sides of the first overflow are simulated, and the fastest that fits is taken.
//   3. If no simulated plan fits, a table is made for the budget alone. If the table's plan overflows, the simulator
//      says during which event. The estimate of the event's segment is raised, and the table is made again, until a
//      plan fits, no plan exists, or the rounds are used up.
//   4. A few plans that overflow, the first and some that are farther away, are returned for Descent.
//
// Estimates are better for few segments, and many segments need fewer bytes. So two families are made, of at most 25
// and at most 80 segments. The work of a table grows with the cube of the number of segments: 80 bounds the time of a
// search for steps of any length.

namespace snug::plan {

SegmentPlans::SegmentPlans(const Simulator& simulator, const StorageUses& uses, Pool& pool)
    : simulator_(simulator), pool_(pool) {
  int before = 0;
  for (const int most : {25, 80}) {
    Segments segments = cut_into_segments(simulator, uses, most);
    if (segments.count() > before) {
      before = segments.count();
      std::vector<Stays> plans = SegmentTable(segments, segments.plain_peak).plans();
      families_.push_back({std::move(segments), std::move(plans)});
    }
  }
}

std::vector<Point> SegmentPlans::around(int64_t budget) {
  std::vector<Point> result;
  for (const Family& family : families_) {
    const int first = first_that_overflows(family, budget);
    std::optional<Point> best = best_near(family, first, budget);
    if (!best) {
      best = correct(family.segments, budget);
    }
    if (best) {
      result.push_back(std::move(*best));
    }
    const int count = static_cast<int>(family.plans.size());
    for (const int more : {0, count / 16, count / 5}) {
      if (first + more < count) {
        result.push_back(pool_.evaluate(family.plans[at(first + more)], budget));
      }
    }
  }
  return result;
}

int SegmentPlans::first_that_overflows(const Family& family, int64_t budget) {
  const auto first = std::partition_point(family.plans.begin(), family.plans.end(),
                                          [&](const Stays& plan) { return pool_.evaluate(plan, budget).fits(); });
  return static_cast<int>(first - family.plans.begin());
}

// The fastest plan that fits among the plans on both sides of plan `number`.
std::optional<Point> SegmentPlans::best_near(const Family& family, int number, int64_t budget) {
  constexpr int kBeside = 4;
  const int end = std::min(static_cast<int>(family.plans.size()), number + kBeside);
  std::optional<Point> best;
  for (int i = std::max(0, number - kBeside); i < end; ++i) {
    Point point = pool_.evaluate(family.plans[at(i)], budget);
    if (point.fits() && (!best || point.run.seconds < best->run.seconds)) {
      best = std::move(point);
    }
  }
  return best;
}

// Step 3 of the essay above.
std::optional<Point> SegmentPlans::correct(Segments segments, int64_t budget) {
  constexpr int kRounds = 6;
  for (int round = 0; round < kRounds && pool_.work_left() > 0; ++round) {
    const std::optional<Stays> plan = SegmentTable(segments, budget).within(budget);
    if (!plan) {
      return std::nullopt;
    }
    Point point = pool_.evaluate(*plan, budget);
    if (point.fits()) {
      return point;
    }
    if (!point.possible()) {
      return std::nullopt;
    }
    segments.raise(simulator_.profile(), point.run.peak_event, point.run.peak_bytes - budget);
  }
  return std::nullopt;
}

}  // namespace snug::plan
