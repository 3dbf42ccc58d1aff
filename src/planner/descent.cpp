#include "src/planner/descent.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/planner/at.h"

// A plan overflows if its level exceeds the budget during some events. Which storages should leave memory so that the
// plan fits, at the least cost in time?
//
// A knapsack over saved bytes is simple, but blind: a storage that is dropped must be rebuilt, and the rebuild may
// overflow elsewhere. So Descent is greedy and asks the simulator:
//
//   1. Rank the storages that are in memory while the plan overflows by estimated relief for each estimated second. As
//      in DTR (Kirisame et al., 2021) the estimate for a storage includes the storage's whole chain of dropped
//      producers.
//   2. Simulate the best few changes of a single storage. Simulate also many changes at once, because these save
//      planning time: a quarter of all candidates, a sixteenth, and so on. A change is not simulated if another change
//      is better than all bytes of the storage for the least time that the change can add.
//   3. Take the change that removes the most overflow for each second that the change adds. A replay that overflows
//      elsewhere counts against the change.
//   4. Repeat until the plan fits or no change helps.
//
// The result need not be the fastest plan. Filling improves a plan that fits (filling.cpp).

namespace snug::plan {
namespace {

constexpr double kTiny = 1e-12;  // seconds

}  // namespace

Descent::Descent(const Simulator& simulator, const StorageUses& uses, Pool& pool)
    : simulator_(simulator), profile_(simulator.profile()), uses_(uses), pool_(pool) {}

// Seconds of the storage's operator, and of the producers of all needed storages that the plan neither keeps nor
// offloads. `seen`: per operator, the storage for which the operator was last counted.
//
// Empty: by the estimate the storage cannot be rebuilt, and may be offloaded instead. The estimate does not know the
// storages that the program or an earlier Unpack still holds. So without a link the result is always a number, and the
// simulation decides.
std::optional<double> Descent::seconds_to_rebuild(int storage, const Stays& plan, std::vector<int>& seen) {
  double seconds = kTiny;
  bool is_possible = true;
  std::vector<Value> pending = {{storage, simulator_.last_version(storage)}};
  while (!pending.empty()) {
    const Value value = pending.back();
    pending.pop_back();
    const int op = simulator_.producer(value);
    const bool is_at_hand = value.storage != storage && value.version == simulator_.last_version(value.storage) &&
                            plan[at(value.storage)] <= Stay::kept();
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

// Storages that are in memory during an overflow between forward and backward, sorted by the ratio of estimated relief
// to estimated cost, the best first.
std::vector<Descent::Candidate> Descent::candidates(const Point& point, int64_t budget, Transfers transfers) {
  std::vector<int> over(point.run.high.size() + 1, 0);
  for (size_t e = 0; e < point.run.high.size(); ++e) {
    over[e + 1] = over[e] + (point.run.high[e] > budget ? 1 : 0);
  }
  std::vector<std::pair<double, Candidate>> ranked;
  std::vector<int> seen(profile_.operators.size(), -1);
  for (int s = 0; s < static_cast<int>(profile_.storages.size()); ++s) {
    const Stay stay = point.plan[at(s)];
    const int last_use = point.run.last_use[at(s)];
    const int last = stay == Stay::kept() ? std::min(uses_.unpacked_at[at(s)], std::max(0, last_use)) : last_use;
    // A storage that is rebuilt and held was gone until the backward pass first asked for the storage.
    const int first =
        stay == Stay::kept() ? uses_.dropped_at[at(s)] : std::max(uses_.dropped_at[at(s)], uses_.unpacked_at[at(s)]);
    const StorageKind kind = profile_.storages[at(s)].kind;
    const bool is_fixed = kind == StorageKind::External || (kind == StorageKind::Pinned && !uses_.may_leave[at(s)]);
    if (stay == Stay::never() || is_fixed || first >= last || over[at(last)] == over[at(first)]) {
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
    const Stay leaving = transfers == Transfers::Hidden ? Stay::streamed() : Stay::offloaded();
    const Stay choice = seconds == transfer ? leaving : Stay::once_rebuilt();
    const double most =
        static_cast<double>(bytes) * static_cast<double>(over[at(std::max(last, last_use))] - over[at(first)]);
    ranked.push_back({relief / seconds, {s, choice, rebuild.has_value(), most}});
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Candidate> result;
  for (const auto& [ratio, candidate] : ranked) {
    result.push_back(candidate);
  }
  return result;
}

// No change of the storage from `stay` to `choice` adds less time: a storage that leaves memory goes both ways, and a
// storage that stayed in memory is made at least once.
double Descent::least_seconds(int storage, Stay stay, Stay choice) const {
  const int64_t bytes = profile_.storages[at(storage)].bytes;
  const int op = simulator_.last_producer(storage);
  const double seconds = choice == Stay::streamed() ? 0
                         : choice.leaves() ? profile_.link.out_seconds(bytes) + profile_.link.back_seconds(bytes)
                         : stay == Stay::kept() && op >= 0 ? profile_.operators[at(op)].seconds
                                                           : 0;
  return std::max(kTiny, seconds);
}

std::optional<Point> Descent::best_change(const Point& from, int64_t budget, Transfers transfers) {
  constexpr size_t kTried = 4;  // candidates that are simulated in any case; more only until a change helps
  const std::vector<Candidate> ranked = candidates(from, budget, transfers);
  std::optional<Point> best;
  double best_ratio = 0;
  // The tape comes with the first change, whichever the change is.
  const double before =
      from.run.has_tape() ? from.run.seconds : profile_.step_seconds(profile_.operator_seconds(), /*has_tape=*/true);
  const auto consider = [&](const Stays& plan, double weight) {
    Point point = pool_.evaluate(plan, budget);
    if (point.possible() && point.overflow < from.overflow) {
      const double ratio = weight * (from.overflow - point.overflow) / std::max(kTiny, point.run.seconds - before);
      if (!best || ratio > best_ratio) {
        best_ratio = ratio;
        best = std::move(point);
      }
    }
  };
  for (size_t many = ranked.size() / 4; many > 1; many /= 4) {
    Stays plan = from.plan;
    for (size_t i = 0; i < many; ++i) {
      Stay& stay = plan[at(ranked[i].storage)];
      const bool is_less = ranked[i].choice.leaves() || stay < ranked[i].choice;
      stay = is_less ? ranked[i].choice : Stay::never();
    }
    consider(plan, 1.2);  // a slightly worse ratio is accepted, because many changes at once save planning time
  }
  for (size_t first = 0; first < ranked.size() && (first < kTried || !best) && pool_.work_left() > 0; ++first) {
    const auto& [s, cheaper, can_be_rebuilt, most] = ranked[first];
    for (const Stay choice : {Stay::streamed(), Stay::once_rebuilt(), Stay::never(), Stay::offloaded()}) {
      const Stay stay = from.plan[at(s)];
      const bool is_less = choice.leaves() ? uses_.may_leave[at(s)] && (!stay.leaves() || stay < choice)
                                           : can_be_rebuilt && stay < choice;
      if (is_less && most / least_seconds(s, stay, choice) > best_ratio) {
        Stays plan = from.plan;
        plan[at(s)] = choice;
        consider(plan, 1);
      }
    }
  }
  return best;
}

Point Descent::run(Point from, int64_t budget, Transfers transfers) {
  while (from.possible() && !from.fits() && pool_.work_left() > 0) {
    std::optional<Point> best = best_change(from, budget, transfers);
    if (!best) {
      return from;
    }
    from = std::move(*best);
  }
  return from;
}

}  // namespace snug::plan
