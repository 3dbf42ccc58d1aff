#include "src/planner/solver.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <tuple>
#include <utility>

#include "src/planner/at.h"
#include "src/planner/bound.h"

// Which storages should be kept, rebuilt or offloaded, so that a step fits into a budget and is fastest? The choice is
// NP-hard already on chains (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous
// chains", RR-9302). Dynamic programming is fast, but sees only plans of segments and estimates their bytes. Local
// search sees all plans, but depends on the plan that it begins with. So the solver combines both, with the simulator
// as the only judge:
//
//  - segments: the step is cut where few bytes cross. Dynamic programming says which segments keep, drop or run again
//    over several levels (segment_table.cpp).
//  - descent: plain training, and plans of segments that overflow a little, are brought down to the budget, cheapest
//    change first (descent.cpp).
//  - filling: plans that fit keep storages again while bytes are free, and the best few plans are polished
//    (filling.cpp).
//
// No returned plan is slower than the best plan of segments. The pool remembers every simulated plan whose point (peak,
// seconds) no other plan beats, so answers only get better. The answer need not be optimal; bound.cpp says how far it
// can be from the optimum. Simulated work is limited, so that the same calls give the same plans on every machine.

namespace snug::plan {
namespace {

// The same step with the same time for everything. The most frugal plan does not depend on times, but the plan that a
// search finds does, and measured times differ from run to run.
Profile with_even_times(Profile profile) {
  for (Operator& op : profile.operators) {
    op.seconds = 1;
  }
  for (BackwardStep& step : profile.backward) {
    step.seconds = 1;
  }
  if (profile.link.is_open()) {
    profile.link.out_bytes_per_second = profile.link.back_bytes_per_second = 1;
    profile.link.seconds = 1;
  }
  profile.host_seconds = profile.tape_seconds = 0;
  return profile;
}

// Each storage that can be rebuilt gets `choice`, or never() if `choice` leaves and the storage must not. Each other
// storage leaves if possible, and else is kept.
Stays frugal(const Simulator& simulator, const StorageUses& uses, Stay choice) {
  const Profile& profile = simulator.profile();
  Stays plan = keep_all(profile);
  for (int s = 0; s < static_cast<int>(plan.size()); ++s) {
    const Storage& storage = profile.storages[at(s)];
    const int op = simulator.last_producer(s);
    const bool can_be_rebuilt =
        storage.kind == StorageKind::Activation && op >= 0 && profile.operators[at(op)].replayable;
    const bool leaves = uses.may_leave[at(s)] && (choice.leaves() || !can_be_rebuilt);
    plan[at(s)] = leaves            ? (choice.leaves() ? choice : Stay::offloaded())
                  : !can_be_rebuilt ? Stay::kept()
                  : choice.leaves() ? Stay::never()
                                    : choice;
  }
  return plan;
}

}  // namespace

Solver::Solver(const Simulator& simulator, SolverOptions options)
    : simulator_(simulator),
      options_(options),
      uses_(simulator),
      pool_(simulator),
      descent_(simulator, uses_, pool_),
      filling_(simulator, uses_, pool_) {}

// If plain training fits, nothing is faster. A plan with fewer bytes may be as fast.
Answer Solver::answer(int64_t budget) {
  const Stays all = keep_all(simulator_.profile());
  if (const Simulation plain = simulator_.run(all); plain.peak_bytes <= budget) {
    return plan_of(all, plain.seconds, plain.peak_bytes, budget);
  }
  const auto found = pool_.within(budget);
  if (found == pool_.known().end()) {
    return Infeasible{pool_.known().begin()->first};
  }
  const auto& [peak, best] = *found;
  return plan_of(best.second, best.first, peak, budget);
}

Solution Solver::plan_of(const Stays& stays, double seconds, int64_t peak, int64_t budget) {
  const Simulation plain = simulator_.run(keep_all(simulator_.profile()));
  return {.stays = stays,
          .peak_bytes = peak,
          .seconds = seconds,
          .plain_peak_bytes = plain.peak_bytes,
          .plain_seconds = plain.seconds,
          .bound_seconds = std::min(seconds, bound_within(budget))};
}

double Solver::bound_within(int64_t budget) {
  auto bound = bounds_.find(budget);
  if (bound == bounds_.end()) {
    bound = bounds_.emplace(budget, lower_bound_seconds(simulator_, budget)).first;
  }
  return bound->second;
}

// Plans to polish, the most promising plan first.
std::vector<Point> Solver::first_plans(int64_t budget) {
  if (!segment_plans_) {
    segment_plans_.emplace(simulator_, uses_, pool_);
  }
  std::vector<Point> result = segment_plans_->around(budget);
  result.push_back(pool_.evaluate(keep_all(simulator_.profile()), budget));
  if (const auto found = pool_.within(budget); found != pool_.known().end()) {
    result.push_back(pool_.evaluate(Stays(found->second.second), budget));
  } else {
    result.push_back(pool_.evaluate(Stays(pool_.known().begin()->second.second), budget));
  }
  using Transfers = Descent::Transfers;
  const auto from_each_of = [&](std::vector<Point> points, Transfers transfers) {
    for (Point& point : points) {
      point = filling_.fill(descent_.run(std::move(point), budget, transfers), budget);
    }
    return points;
  };
  std::vector<Point> streaming;
  if (simulator_.profile().link.is_open()) {
    streaming = from_each_of(result, Transfers::Hidden);
  }
  result = from_each_of(std::move(result), Transfers::Waited);
  std::ranges::move(streaming, std::back_inserter(result));
  for (const Stay choice : {Stay::once_rebuilt(), Stay::never(), Stay::offloaded(), Stay::streamed()}) {
    if (!choice.leaves() || simulator_.profile().link.is_open()) {
      result.push_back(pool_.evaluate(frugal(simulator_, uses_, choice), budget));
    }
  }
  std::erase_if(result, [](const Point& one) { return !one.possible(); });
  std::stable_sort(result.begin(), result.end(), [](const Point& a, const Point& b) {
    return std::tuple(a.overflow, a.run.seconds) < std::tuple(b.overflow, b.run.seconds);
  });
  const auto same = std::ranges::unique(result, {}, &Point::plan);
  result.erase(same.begin(), same.end());
  return result;
}

void Solver::search(int64_t budget, int64_t simulations) {
  constexpr size_t kPolished = 5;
  constexpr double kGoodEnough = 1.005;  // times the bound: then the search ends
  if (!searched_.insert(budget).second) {
    return;
  }
  pool_.set_work(std::min(options_.work, simulations * std::ssize(simulator_.profile().events)));
  if (pool_.evaluate(keep_all(simulator_.profile()), budget).fits()) {
    return;
  }
  std::vector<Point> from = first_plans(budget);
  if (!from.empty() && from[0].fits() && from[0].run.seconds <= kGoodEnough * bound_within(budget)) {
    return;
  }
  from.resize(std::min(from.size(), kPolished));
  const int64_t share = std::max<int64_t>(0, pool_.work_left()) / std::max<int64_t>(1, std::ssize(from));
  for (size_t i = from.size(); i-- > 0;) {
    filling_.polish(std::move(from[i]), budget, static_cast<int64_t>(i) * share);
  }
}

Solution Solver::smallest() {
  const bool is_known = smallest_.has_value();
  if (!is_known) {
    const Simulator even(with_even_times(simulator_.profile()));
    Solver solver(even, options_);
    smallest_ = solver.smallest_of_these_times();
    pool_.add_steps(solver.steps());
  }
  const Point point = pool_.evaluate(*smallest_, 0);
  if (!is_known) {
    searched_.erase(searched_.lower_bound(point.run.peak_bytes), searched_.end());
  }
  return plan_of(point.plan, point.run.seconds, point.run.peak_bytes, point.run.peak_bytes);
}

Stays Solver::smallest_of_these_times() {
  constexpr int kTries = 4;  // a search for a budget that is just missed ends lower than a search for 0 bytes
  constexpr int64_t kSimulationsForBytes = 4'000;  // peaks of small graphs fall by up to a sixth from 1,000 on
  const int64_t bound = lower_bound_bytes(simulator_);
  int64_t least = std::numeric_limits<int64_t>::max();
  int64_t budget = 0;
  for (int i = 0; i < kTries; ++i) {
    search(budget, kSimulationsForBytes);
    const int64_t found = pool_.known().begin()->first;
    if (found == least || found == bound) {
      break;
    }
    least = found;
    budget = least - least / 16;
  }
  return pool_.known().begin()->second.second;
}

Answer Solver::solve(int64_t budget) {
  search(budget);
  return answer(budget);
}

void Solver::search_longer(SolverOptions options) {
  options_ = options;
  searched_.clear();
}

void Solver::accept(const Stays& plan, int64_t budget) {
  pool_.evaluate(plan, budget);
  searched_.insert(budget);
}

std::vector<Answer> Solver::curve(std::vector<int64_t> budgets) {
  std::vector<int64_t> ascending = budgets;
  std::sort(ascending.begin(), ascending.end());
  for (const int64_t budget : ascending) {
    search(budget);
  }
  std::vector<Answer> answers;
  for (const int64_t budget : budgets) {
    answers.push_back(answer(budget));
  }
  return answers;
}

}  // namespace snug::plan
