#include "snug/planner/solver.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "snug/planner/bound.h"
#include "snug/planner/chain_plans.h"
#include "snug/planner/detail/at.h"

// Choosing what to rebuild is NP-hard already on chains (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal
// checkpointing for heterogeneous chains", RR-9302), so this is search, with the simulator as the only judge:
//
//  - descend: from plain training, take step by step the change that removes most overflow (bytes above the budget, summed
//    over the events where there are any) per second that it adds. As in DTR (Kirisame et al., 2021) a storage costs what its
//    whole chain of dropped producers costs; unlike a knapsack over saved bytes, a change whose replay overflows elsewhere is
//    seen and counted against it. Candidates are ranked by an estimate, and the best few are simulated, also many at once.
//  - climb: from a plan that fits, keep again what the room allows, and swap what is kept for what is dropped.
// A storage that may be offloaded is one more candidate, for the seconds of its way out and back.
//
// Greedy steps miss plans that rebuild over several levels, which deep chains need when bytes are few: those are made by dynamic
// programming (chain_plans.h) and put to the same judge.
//
// Every plan ever simulated whose point (peak, seconds) no other beats is remembered, so answers only get better.

namespace snug::plan {
namespace {

constexpr double kTiny = 1e-12;      // seconds
constexpr int64_t kPerReplayed = 2;  // of work, for an operator that runs again

using detail::at;

// Which plan is the most frugal one does not depend on times; which is found does, and measured ones are others each time.
StepProfile with_even_times(StepProfile profile) {
  for (ProfiledOperator& op : profile.operators) {
    op.seconds = 1;
  }
  for (BackwardStep& step : profile.backward) {
    step.seconds = 1;
  }
  if (profile.link.is_open()) {
    profile.link.out_bytes_per_second = profile.link.back_bytes_per_second = 1;
    profile.link.seconds = 1;
  }
  return profile;
}

}  // namespace

struct PlanSolver::Point {
  Stays plan;
  Simulation run;
  double overflow = 0;  // byte events

  bool possible() const { return run.impossible < 0 && !run.is_cut_short; }
  bool fits() const { return possible() && overflow == 0; }
};

PlanSolver::PlanSolver(const StepSimulator& simulator, SolverOptions options)
    : simulator_(simulator),
      options_(options),
      ways_(simulator.profile().storages.size(), {Stay::kept(), Stay::once_rebuilt(), Stay::never()}) {
  const StepProfile& profile = simulator.profile();
  const int events = static_cast<int>(profile.events.size());
  dropped_at_.assign(profile.storages.size(), events);
  unpacked_at_.assign(profile.storages.size(), events);
  for (int e = 0; e < events; ++e) {
    const ProfileEvent& event = profile.events[at(e)];
    if (event.kind == EventKind::Drop) {
      dropped_at_[at(event.index)] = e;
    } else if (event.kind == EventKind::Unpack) {
      unpacked_at_[at(event.index)] = std::min(unpacked_at_[at(event.index)], e);
    }
  }
  for (int s = 0; s < static_cast<int>(profile.storages.size()); ++s) {
    if (profile.storages[at(s)].kind != StorageKind::External) {
      choices_.push_back(s);
      if (profile.link.is_open() && profile.storages[at(s)].bytes > 0) {
        ways_[at(s)].push_back(Stay::offloaded());
      }
    }
  }
}

PlanSolver::Point PlanSolver::evaluate(const Stays& plan, int64_t budget) {
  Point point{plan, simulator_.run(plan, options_.work / kPerReplayed)};
  ++simulations_;
  steps_ += point.run.steps;
  work_left_ -= static_cast<int64_t>(simulator_.profile().events.size()) + kPerReplayed * point.run.replayed;
  if (point.possible()) {
    for (const int64_t high : point.run.high) {
      point.overflow += static_cast<double>(std::max<int64_t>(0, high - budget));
    }
    remember(point);
  }
  return point;
}

void PlanSolver::remember(const Point& point) {
  const auto next = found_.upper_bound(point.run.peak_bytes);
  if (next != found_.begin() && std::prev(next)->second.first <= point.run.seconds) {
    return;
  }
  auto worse = found_.lower_bound(point.run.peak_bytes);
  while (worse != found_.end() && worse->second.first >= point.run.seconds) {
    worse = found_.erase(worse);
  }
  found_[point.run.peak_bytes] = {point.run.seconds, point.plan};
}

// Of its operator and of the producers of all that that needs and the plan neither keeps nor offloads. `seen`: per operator, the storage that
// it was last counted for. None: by this estimate it cannot be rebuilt, and may be offloaded instead. Without a link there is always a
// number, and the simulation tells: here it is not known what the program or an earlier unpacking still holds.
std::optional<double> PlanSolver::seconds_to_rebuild(int storage, const Stays& plan, std::vector<int>& seen) const {
  const StepProfile& profile = simulator_.profile();
  double seconds = kTiny;
  bool is_possible = true;
  std::vector<ValueId> pending = {{storage, simulator_.last_version(storage)}};
  while (!pending.empty()) {
    const ValueId value = pending.back();
    pending.pop_back();
    const int op = simulator_.producer(value);
    const bool is_at_hand = value.storage != storage && value.version == simulator_.last_version(value.storage) &&
                            (plan[at(value.storage)] == Stay::kept() || plan[at(value.storage)] == Stay::offloaded());
    if (op >= 0 && !is_at_hand && seen[at(op)] != storage) {
      seen[at(op)] = storage;
      ++steps_;
      seconds += profile.operators[at(op)].seconds;
      is_possible = is_possible && profile.operators[at(op)].replayable &&
                    profile.storages[at(value.storage)].kind != StorageKind::Pinned;
      pending.insert(pending.end(), simulator_.needs(op).begin(), simulator_.needs(op).end());
    }
  }
  return is_possible || !profile.link.is_open() ? std::optional(seconds) : std::nullopt;
}

// Storages that overflow in the time between forward and backward, best ratio of estimated relief and cost first.
std::vector<PlanSolver::Candidate> PlanSolver::candidates(const Point& point, int64_t budget) const {
  const StepProfile& profile = simulator_.profile();
  std::vector<int> over(point.run.high.size() + 1, 0);
  for (size_t e = 0; e < point.run.high.size(); ++e) {
    over[e + 1] = over[e] + (point.run.high[e] > budget ? 1 : 0);
  }
  std::vector<std::pair<double, Candidate>> ranked;
  std::vector<int> seen(profile.operators.size(), -1);
  for (const int s : choices_) {
    const int last = point.plan[at(s)] == Stay::kept()
                         ? std::min(unpacked_at_[at(s)], std::max(0, point.run.last_use[at(s)]))
                         : point.run.last_use[at(s)];
    // What is rebuilt and held was gone until the backward pass first asked for it.
    const int first =
        point.plan[at(s)] == Stay::kept() ? dropped_at_[at(s)] : std::max(dropped_at_[at(s)], unpacked_at_[at(s)]);
    const bool is_pinned = profile.storages[at(s)].kind == StorageKind::Pinned;
    if (point.plan[at(s)] == Stay::never() || (is_pinned && !may_leave(s)) || first >= last ||
        over[at(last)] == over[at(first)]) {
      continue;
    }
    const int64_t bytes = profile.storages[at(s)].bytes;
    const std::optional<double> rebuild = seconds_to_rebuild(s, point.plan, seen);
    if (!rebuild && !may_leave(s)) {
      continue;
    }
    const double transfer = may_leave(s) ? kTiny + profile.link.out_seconds(bytes) + profile.link.back_seconds(bytes)
                                         : std::numeric_limits<double>::infinity();
    const double seconds = std::min(rebuild.value_or(transfer), transfer);
    const double relief = static_cast<double>(bytes) * static_cast<double>(over[at(last)] - over[at(first)]);
    ranked.push_back(
        {relief / seconds, {s, seconds == transfer ? Stay::offloaded() : Stay::once_rebuilt(), rebuild.has_value()}});
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Candidate> result;
  for (const auto& [ratio, candidate] : ranked) {
    result.push_back(candidate);
  }
  return result;
}

PlanSolver::Point PlanSolver::descend(Point from, int64_t budget) {
  constexpr size_t kTried = 4;  // candidates simulated at a time
  while (from.possible() && !from.fits() && work_left_ > 0) {
    const std::vector<Candidate> ranked = candidates(from, budget);
    std::optional<Point> best;
    double best_ratio = 0;
    const auto consider = [&](const Stays& plan, double weight) {
      Point point = evaluate(plan, budget);
      if (point.possible() && point.overflow < from.overflow) {
        const double ratio =
            weight * (from.overflow - point.overflow) / std::max(kTiny, point.run.seconds - from.run.seconds);
        if (!best || ratio > best_ratio) {
          best_ratio = ratio;
          best = std::move(point);
        }
      }
    };
    for (size_t many = ranked.size() / 4; many > 1; many /= 4) {
      Stays plan = from.plan;
      for (size_t i = 0; i < many; ++i) {
        plan[at(ranked[i].storage)] = ranked[i].choice;
      }
      consider(plan, 1.2);  // a little worse is as good, for the time it saves
    }
    for (size_t first = 0; first < ranked.size() && (first < kTried || !best) && work_left_ > 0; ++first) {
      const auto& [s, cheaper, can_be_rebuilt] = ranked[first];
      for (const Stay choice : ways_[at(s)]) {
        const bool is_less = choice == Stay::offloaded()
                                 ? from.plan[at(s)] != Stay::offloaded()
                                 : can_be_rebuilt && choice != Stay::kept() && from.plan[at(s)] < choice;
        if (is_less) {
          Stays plan = from.plan;
          plan[at(s)] = choice;
          consider(plan, 1);
        }
      }
    }
    if (!best) {
      return from;
    }
    from = std::move(*best);
  }
  return from;
}

// One change, taken if it overflows less, or fits and is faster, or is as fast with a lower peak.
bool PlanSolver::try_change(Point& best, const Stays& plan, int64_t budget) {
  Point point = evaluate(plan, budget);
  const auto order = [](const Point& p) { return std::tuple(p.overflow, p.run.seconds, p.run.peak_bytes); };
  const bool better = point.possible() && (!best.possible() || order(point) < order(best));
  if (better) {
    best = std::move(point);
  }
  return better;
}

PlanSolver::Point PlanSolver::climb(Point from, int64_t budget, int64_t limit) {
  bool improved = true;
  while (improved && work_left_ > limit) {
    improved = false;
    for (const int s : choices_) {
      for (const Stay choice : ways_[at(s)]) {
        if (choice != from.plan[at(s)] && work_left_ > limit) {
          Stays plan = from.plan;
          plan[at(s)] = choice;
          improved = try_change(from, plan, budget) || improved;
        }
      }
    }
    // Swaps only where no single change helps any more.
    for (size_t i = 0; !improved && work_left_ > limit && i < choices_.size(); ++i) {
      for (size_t j = 0; !improved && work_left_ > limit && j < choices_.size(); ++j) {
        const int s = choices_[i];
        const int other = choices_[j];
        if (s == other) {
          continue;
        }
        for (const Stay first : ways_[at(s)]) {
          for (const Stay second : ways_[at(other)]) {
            if (!improved && work_left_ > limit && first != from.plan[at(s)] && second != from.plan[at(other)]) {
              Stays plan = from.plan;
              plan[at(s)] = first;
              plan[at(other)] = second;
              improved = try_change(from, plan, budget);
            }
          }
        }
      }
    }
  }
  return from;
}

PlanAnswer PlanSolver::answer(int64_t budget) const {
  const auto next = found_.upper_bound(budget);
  if (next == found_.begin()) {
    return Infeasible{found_.empty() ? 0 : found_.begin()->first};
  }
  const auto& [peak, best] = *std::prev(next);
  return plan_of(best.second, best.first, peak, budget);
}

RematPlan PlanSolver::plan_of(const Stays& stays, double seconds, int64_t peak, int64_t budget) const {
  const Simulation plain = simulator_.run(keep_all(simulator_.profile()));
  return {.stays = stays,
          .peak_bytes = peak,
          .seconds = seconds,
          .plain_peak_bytes = plain.peak_bytes,
          .plain_seconds = plain.seconds,
          .bound_seconds = std::min(seconds, lower_bound_seconds(simulator_, budget))};
}

// In a list bytes ascend but for what estimates miss: the least of all, the last that fits, and some beside it are remembered.
void PlanSolver::try_chain_plans(int64_t budget) {
  constexpr int kBeside = 4;
  if (!chain_plans_) {
    chain_plans_ = chain_plans(simulator_);
  }
  for (const std::vector<Stays>& plans : *chain_plans_) {
    const int count = static_cast<int>(plans.size());
    const auto fits = [&](int i) { return evaluate(plans[at(i)], budget).fits(); };
    int first = 0;
    int last = count;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (fits(middle)) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    for (int i = std::max(0, first - kBeside); i < std::min(count, first + kBeside); ++i) {
      fits(i);
    }
  }
}

PlanAnswer PlanSolver::solve(int64_t budget) {
  work_left_ = options_.work;
  const Stays plain = keep_all(simulator_.profile());
  try_chain_plans(budget);
  std::vector<Point> starts;
  starts.push_back(descend(evaluate(plain, budget), budget));
  // From the frugal side: all that can be rebuilt is dropped, and held or not once it is there again, or leaves; what cannot leaves if it may.
  for (const Stay choice : {Stay::once_rebuilt(), Stay::never(), Stay::offloaded()}) {
    if (choice == Stay::offloaded() && !simulator_.profile().link.is_open()) {
      continue;
    }
    Stays plan = plain;
    for (const int s : choices_) {
      const int op = simulator_.producer({s, simulator_.last_version(s)});
      const bool can_be_rebuilt = simulator_.profile().storages[at(s)].kind == StorageKind::Activation && op >= 0 &&
                                  simulator_.profile().operators[at(op)].replayable;
      const bool leaves = may_leave(s) && (choice == Stay::offloaded() || !can_be_rebuilt);
      plan[at(s)] = leaves                        ? Stay::offloaded()
                    : !can_be_rebuilt             ? Stay::kept()
                    : choice == Stay::offloaded() ? Stay::never()
                                                  : choice;
    }
    if (Point start = evaluate(plan, budget); !start.run.is_cut_short) {
      starts.push_back(std::move(start));
    }
  }
  // The best one found so far for this or a smaller budget.
  if (const auto next = found_.upper_bound(budget); next != found_.begin()) {
    starts.push_back(evaluate(std::prev(next)->second.second, budget));
  } else if (!found_.empty()) {
    starts.push_back(descend(evaluate(Stays(found_.begin()->second.second), budget), budget));
  }
  const int64_t share = std::max<int64_t>(0, work_left_) / static_cast<int64_t>(starts.size());
  for (size_t i = starts.size(); i-- > 0;) {
    climb(std::move(starts[i]), budget, static_cast<int64_t>(i) * share);
  }
  return answer(budget);
}

std::vector<PlanAnswer> PlanSolver::curve(std::vector<int64_t> budgets) {
  std::vector<int64_t> ascending = budgets;
  std::sort(ascending.begin(), ascending.end());
  for (const int64_t budget : ascending) {
    solve(budget);
  }
  std::vector<PlanAnswer> answers;
  for (const int64_t budget : budgets) {
    answers.push_back(answer(budget));
  }
  return answers;
}

RematPlan PlanSolver::smallest() {
  const StepSimulator even(with_even_times(simulator_.profile()));
  PlanSolver solver(even, options_);
  const Point point = evaluate(solver.smallest_of_these_times(), 0);
  simulations_ += solver.simulations_;
  steps_ += solver.steps_;
  return plan_of(point.plan, point.run.seconds, point.run.peak_bytes, point.run.peak_bytes);
}

Stays PlanSolver::smallest_of_these_times() {
  constexpr int kTries = 4;  // a search under a budget that is just missed ends lower than one under none
  int64_t least = std::numeric_limits<int64_t>::max();
  int64_t budget = 0;
  for (int i = 0; i < kTries; ++i) {
    solve(budget);
    if (found_.begin()->first == least) {
      break;
    }
    least = found_.begin()->first;
    budget = least - least / 16;
  }
  return found_.begin()->second.second;
}

}  // namespace snug::plan
