#include "src/planner/pool.h"

#include <algorithm>
#include <iterator>

namespace snug::plan {
namespace {

constexpr int64_t kPerReplayed = 2;  // work for an operator that runs again; an event has work 1

// The most operators that a plan may run again. A step that is cut into segments over several levels runs each operator
// about as often as the step has levels. A plan that runs operators more often holds nothing of some chain, and a
// better plan exists.
int64_t most_replayed(const Profile& profile) {
  constexpr int64_t kEachTimes = 16;
  constexpr int64_t kAnyhow = 1000;
  return std::max(kAnyhow, kEachTimes * std::ssize(profile.operators));
}

}  // namespace

Pool::Pool(const Simulator& simulator) : simulator_(simulator), most_replayed_(most_replayed(simulator.profile())) {}

Point Pool::evaluate(const Stays& plan, int64_t budget) {
  Point point{plan, simulator_.run(plan, most_replayed_)};
  ++simulations_;
  steps_ += point.run.steps;
  work_left_ -= std::ssize(simulator_.profile().events) + kPerReplayed * point.run.replayed;
  if (point.possible()) {
    for (const int64_t high : point.run.high) {
      if (high > budget) {
        point.overflow += static_cast<double>(high - budget);
      }
    }
    remember(point);
  }
  return point;
}

void Pool::remember(const Point& point) {
  const auto next = known_.upper_bound(point.run.peak_bytes);
  if (next != known_.begin() && std::prev(next)->second.first <= point.run.seconds) {
    return;
  }
  auto worse = known_.lower_bound(point.run.peak_bytes);
  while (worse != known_.end() && worse->second.first >= point.run.seconds) {
    worse = known_.erase(worse);
  }
  known_[point.run.peak_bytes] = {point.run.seconds, point.plan};
}

Pool::Known::const_iterator Pool::within(int64_t budget) const {
  const auto next = known_.upper_bound(budget);
  return next == known_.begin() ? known_.end() : std::prev(next);
}

}  // namespace snug::plan
