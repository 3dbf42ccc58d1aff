#include "src/planner/filling.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "src/planner/at.h"
#include "src/planner/room.h"

// A plan that fits usually leaves bytes free during some events. Which dropped storages should be kept in the free
// bytes, so that most time is saved?
//
// The exact question is a packing problem with a constraint for each event, and its gains depend on each other: a kept
// storage shortens replays of other storages. So Filling works in two stages, and the simulator judges every result:
//
//   fill    Gains are estimated from the replays of the plan: an operator that does not run again saves its seconds.
//           Gains are taken in the order of saved seconds for each byte while the bytes are free (room.h). Then all
//           taken gains are simulated at once. If the replays need more than was free, the first so many gains are
//           tried, and halving finds the number. A few rounds follow, each with the replays of the new plan.
//   polish  Each single change of a storage is simulated; if no single change helps, each swap of two storages. Polish
//           also helps plans that overflow, and takes all work it is given.
//
// Fill takes few simulations, because of the halving. Polish takes many, so solver.cpp polishes only the best plans.

namespace snug::plan {

Filling::Filling(const Simulator& simulator, const StorageUses& uses, Pool& pool)
    : simulator_(simulator),
      profile_(simulator.profile()),
      uses_(uses),
      pool_(pool),
      ways_(profile_.storages.size(), {Stay::kept(), Stay::once_rebuilt(), Stay::never()}) {
  for (int s = 0; s < static_cast<int>(profile_.storages.size()); ++s) {
    if (profile_.storages[at(s)].kind != StorageKind::External) {
      choices_.push_back(s);
      if (uses_.may_leave[at(s)]) {
        ways_[at(s)].push_back(Stay::streamed());
        ways_[at(s)].push_back(Stay::offloaded());
      }
    }
  }
}

// Gains from storages that the plan makes again: to keep the storage, or to hold the storage after the first rebuild.
// The best gain is first.
std::vector<Filling::Gain> Filling::gains(const Point& point) const {
  std::vector<int> times(profile_.operators.size(), 0);
  std::vector<int> first_at(profile_.operators.size(), 0);
  for (const Replay& replay : point.run.replays) {
    for (const int op : replay.operators) {
      first_at[at(op)] = times[at(op)]++ == 0 ? replay.event : first_at[at(op)];
    }
  }
  std::vector<Gain> result;
  for (const int s : choices_) {
    const int op = simulator_.last_producer(s);
    const Stay stay = point.plan[at(s)];
    const auto bytes = static_cast<double>(profile_.storages[at(s)].bytes);
    if (op < 0 || times[at(op)] == 0 || stay <= Stay::kept() || bytes == 0) {
      continue;
    }
    const double seconds = profile_.operators[at(op)].seconds;
    const int first = first_at[at(op)];
    const int held_from = stay == Stay::never() ? point.run.last_use[at(s)] : std::max(first, stay.event);
    if (uses_.dropped_at[at(s)] <= held_from) {
      result.push_back({times[at(op)] * seconds / bytes, s, Stay::kept(), uses_.dropped_at[at(s)], held_from});
    }
    if (stay != Stay::once_rebuilt() && times[at(op)] > 1 && first <= held_from) {
      result.push_back({(times[at(op)] - 1) * seconds / bytes, s, Stay::once_rebuilt(), first, held_from});
    }
  }
  std::stable_sort(result.begin(), result.end(), [](const Gain& a, const Gain& b) { return a.value > b.value; });
  return result;
}

Point Filling::fill(Point from, int64_t budget) {
  constexpr int kRounds = 8;
  for (int round = 0; round < kRounds && pool_.work_left() > 0 && from.fits(); ++round) {
    Room room(from.run.high, budget);
    std::vector<Gain> taken;
    for (const Gain& gain : gains(from)) {
      if (room.take(gain.first, gain.last, profile_.storages[at(gain.storage)].bytes)) {
        taken.push_back(gain);
      }
    }
    std::optional<Point> best;
    size_t fitting = 0;
    size_t too_many = taken.size() + 1;
    for (size_t many = taken.size(); many > fitting && pool_.work_left() > 0; many = (fitting + too_many) / 2) {
      Stays plan = from.plan;
      for (size_t i = 0; i < many; ++i) {
        plan[at(taken[i].storage)] = std::min(plan[at(taken[i].storage)], taken[i].choice);
      }
      Point point = pool_.evaluate(plan, budget);
      (point.fits() ? fitting : too_many) = many;
      if (point.fits() && (!best || point.run.seconds < best->run.seconds)) {
        best = std::move(point);
      }
    }
    if (!best || best->run.seconds >= from.run.seconds) {
      return from;
    }
    from = std::move(*best);
  }
  return from;
}

// Takes the plan if the plan overflows less; or overflows as much and is faster; or is as fast and has a lower peak.
bool Filling::improve(Point& best, const Stays& plan, int64_t budget) {
  Point point = pool_.evaluate(plan, budget);
  const auto order = [](const Point& p) { return std::tuple(p.overflow, p.run.seconds, p.run.peak_bytes); };
  const bool better = point.possible() && (!best.possible() || order(point) < order(best));
  if (better) {
    best = std::move(point);
  }
  return better;
}

// Storages whose treatment has an effect: the backward pass or a replay reads the storage, or a replay makes the
// storage again. A change of another storage alone has the simulation of `point`.
std::vector<bool> Filling::matter(const Point& point) const {
  std::vector<bool> result(profile_.storages.size(), false);
  for (const int s : choices_) {
    result[at(s)] = point.run.last_use[at(s)] >= 0;
  }
  for (const Replay& replay : point.run.replays) {
    for (const int op : replay.operators) {
      for (const Value& value : profile_.operators[at(op)].writes) {
        result[at(value.storage)] = true;
      }
    }
  }
  return result;
}

bool Filling::change_one(Point& best, int64_t budget, int64_t limit) {
  bool improved = false;
  std::vector<bool> matters = matter(best);
  for (const int s : choices_) {
    if (!matters[at(s)]) {
      continue;
    }
    for (const Stay choice : ways_[at(s)]) {
      if (choice != best.plan[at(s)] && pool_.work_left() > limit) {
        Stays plan = best.plan;
        plan[at(s)] = choice;
        if (improve(best, plan, budget)) {
          improved = true;
          matters = matter(best);
        }
      }
    }
  }
  return improved;
}

bool Filling::swap_two(Point& best, int64_t budget, int64_t limit) {
  const std::vector<bool> matters = matter(best);
  for (const int s : choices_) {
    for (const int other : choices_) {
      if (!matters[at(s)] && !matters[at(other)]) {
        continue;
      }
      for (const Stay first : ways_[at(s)]) {
        for (const Stay second : ways_[at(other)]) {
          if (pool_.work_left() <= limit) {
            return false;
          }
          if (s == other || first == best.plan[at(s)] || second == best.plan[at(other)]) {
            continue;
          }
          Stays plan = best.plan;
          plan[at(s)] = first;
          plan[at(other)] = second;
          if (improve(best, plan, budget)) {
            return true;
          }
        }
      }
    }
  }
  return false;
}

// Swaps follow only when no single change helps any more.
Point Filling::polish(Point from, int64_t budget, int64_t limit) {
  while (pool_.work_left() > limit && (change_one(from, budget, limit) || swap_two(from, budget, limit))) {
  }
  return from;
}

}  // namespace snug::plan
