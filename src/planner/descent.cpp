#include "src/planner/descent.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/planner/at.h"

// Step by step the change is taken that removes most overflow for each second that it adds. As in DTR (Kirisame et al.,
// 2021) a storage costs what its whole chain of dropped producers costs; unlike a knapsack over saved bytes, a change
// whose replay overflows elsewhere is seen and counted against it. Candidates are ranked by an estimate, and the best
// few are simulated, also many at once.

namespace snug::detail {
namespace {

using plan::Stay;
using plan::Stays;

constexpr double kTiny = 1e-12;  // seconds

}  // namespace

Descent::Descent(const plan::StepSimulator& simulator, const StorageUses& uses, PlanPool& pool)
    : simulator_(simulator), profile_(simulator.profile()), uses_(uses), pool_(pool) {}

// Of its operator and of the producers of all that that needs and the plan neither keeps nor offloads. `seen`: per
// operator, the storage that it was last counted for. None: by this estimate it cannot be rebuilt, and may be offloaded
// instead. Without a link there is always a number, and the simulation tells: here it is not known what the program or
// an earlier unpacking still holds.
std::optional<double> Descent::seconds_to_rebuild(int storage, const plan::Stays& plan, std::vector<int>& seen) {
  double seconds = kTiny;
  bool is_possible = true;
  std::vector<ValueId> pending = {{storage, simulator_.last_version(storage)}};
  while (!pending.empty()) {
    const ValueId value = pending.back();
    pending.pop_back();
    const int op = simulator_.producer(value);
    const bool is_at_hand = value.storage != storage && value.version == simulator_.last_version(value.storage) &&
                            plan[at(value.storage)] <= plan::Stay::kept();
    if (op >= 0 && !is_at_hand && seen[at(op)] != storage) {
      seen[at(op)] = storage;
      pool_.add_steps(1);
      seconds += profile_.operators[at(op)].seconds;
      is_possible = is_possible && profile_.operators[at(op)].replayable &&
                    profile_.storages[at(value.storage)].kind != StorageKind::Pinned;
      pending.insert(pending.end(), simulator_.needs(op).begin(), simulator_.needs(op).end());
    }
  }
  return is_possible || !profile_.link.is_open() ? std::optional(seconds) : std::nullopt;
}

// Storages that overflow in the time between forward and backward, best ratio of estimated relief and cost first.
std::vector<Descent::Candidate> Descent::candidates(const PlanPoint& point, int64_t budget, Transfers transfers) {
  std::vector<int> over(point.run.high.size() + 1, 0);
  for (size_t e = 0; e < point.run.high.size(); ++e) {
    over[e + 1] = over[e] + (point.run.high[e] > budget ? 1 : 0);
  }
  std::vector<std::pair<double, Candidate>> ranked;
  std::vector<int> seen(profile_.operators.size(), -1);
  for (int s = 0; s < static_cast<int>(profile_.storages.size()); ++s) {
    const plan::Stay stay = point.plan[at(s)];
    const int last_use = point.run.last_use[at(s)];
    const int last = stay == plan::Stay::kept() ? std::min(uses_.unpacked_at[at(s)], std::max(0, last_use)) : last_use;
    // What is rebuilt and held was gone until the backward pass first asked for it.
    const int first = stay == plan::Stay::kept() ? uses_.dropped_at[at(s)]
                                                 : std::max(uses_.dropped_at[at(s)], uses_.unpacked_at[at(s)]);
    const StorageKind kind = profile_.storages[at(s)].kind;
    const bool is_fixed = kind == StorageKind::External || (kind == StorageKind::Pinned && !uses_.may_leave[at(s)]);
    if (stay == plan::Stay::never() || is_fixed || first >= last || over[at(last)] == over[at(first)]) {
      continue;
    }
    const int64_t bytes = profile_.storages[at(s)].bytes;
    const std::optional<double> rebuild = seconds_to_rebuild(s, point.plan, seen);
    if (!rebuild && !uses_.may_leave[at(s)]) {
      continue;
    }
    const double way = transfers == Transfers::Hidden || !uses_.may_leave[at(s)]
                           ? 0
                           : profile_.link.out_seconds(bytes) + profile_.link.back_seconds(bytes);
    const double transfer = uses_.may_leave[at(s)] ? kTiny + way : std::numeric_limits<double>::infinity();
    const double seconds = std::min(rebuild.value_or(transfer), transfer);
    const double relief = static_cast<double>(bytes) * static_cast<double>(over[at(last)] - over[at(first)]);
    const plan::Stay leaving = transfers == Transfers::Hidden ? plan::Stay::streamed() : plan::Stay::offloaded();
    const plan::Stay choice = seconds == transfer ? leaving : plan::Stay::once_rebuilt();
    ranked.push_back({relief / seconds, {s, choice, rebuild.has_value()}});
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Candidate> result;
  for (const auto& [ratio, candidate] : ranked) {
    result.push_back(candidate);
  }
  return result;
}

std::optional<PlanPoint> Descent::best_change(const PlanPoint& from, int64_t budget, Transfers transfers) {
  constexpr size_t kTried = 4;  // candidates simulated at a time
  const std::vector<Candidate> ranked = candidates(from, budget, transfers);
  std::optional<PlanPoint> best;
  double best_ratio = 0;
  const auto consider = [&](const plan::Stays& plan, double weight) {
    PlanPoint point = pool_.evaluate(plan, budget);
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
    plan::Stays plan = from.plan;
    for (size_t i = 0; i < many; ++i) {
      plan::Stay& stay = plan[at(ranked[i].storage)];
      const bool is_less = ranked[i].choice.leaves() || stay < ranked[i].choice;
      stay = is_less ? ranked[i].choice : plan::Stay::never();
    }
    consider(plan, 1.2);  // a little worse is as good, for the time it saves
  }
  for (size_t first = 0; first < ranked.size() && (first < kTried || !best) && pool_.work_left() > 0; ++first) {
    const auto& [s, cheaper, can_be_rebuilt] = ranked[first];
    for (const plan::Stay choice :
         {plan::Stay::once_rebuilt(), plan::Stay::never(), plan::Stay::streamed(), plan::Stay::offloaded()}) {
      const plan::Stay stay = from.plan[at(s)];
      const bool is_less = choice.leaves() ? uses_.may_leave[at(s)] && (!stay.leaves() || stay < choice)
                                           : can_be_rebuilt && stay < choice;
      if (is_less) {
        plan::Stays plan = from.plan;
        plan[at(s)] = choice;
        consider(plan, 1);
      }
    }
  }
  return best;
}

PlanPoint Descent::run(PlanPoint from, int64_t budget, Transfers transfers) {
  while (from.possible() && !from.fits() && pool_.work_left() > 0) {
    std::optional<PlanPoint> best = best_change(from, budget, transfers);
    if (!best) {
      return from;
    }
    from = std::move(*best);
  }
  return from;
}

}  // namespace snug::detail
