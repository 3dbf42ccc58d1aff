#include <algorithm>
#include <limits>
#include <vector>

#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/planner/detail/at.h"
#include "snug/planner/solver.h"

// The bound is a relaxation of a covering problem. Plain training exceeds the budget by d(t) during event t. Whatever a
// plan does, what it must do without during t has to make up d(t), and a saved storage that is not there must be rebuilt
// later: at least the operators that wrote it run once more (an operator that wrote several saved storages is shared out among
// them). So time rises at least by the cheapest fractional choice that covers d(t) (the fractional knapsack of Dantzig, 1957),
// for every t; the largest of these is the bound. Of the other operators that a rebuild needs, those count that make values for
// this one alone, of no fewer bytes: to hold such a value through t instead would give back nothing. The rebuild's own memory is ignored.
// Where a storage may be offloaded, its way out and back counts if that is shorter: to offload one of those values instead takes no less.

namespace snug::plan {
namespace {

using detail::at;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Droppable {
  int storage;
  int64_t bytes;
  double seconds;
  std::vector<std::pair<int, int>>
      gaps;  // events, both ends included, in which it may be gone and is there in plain training
};

double transfer_seconds(const StepProfile& profile, size_t storage) {
  const int64_t bytes = profile.storages[storage].bytes;
  return profile.link.is_open() ? profile.link.out_seconds(bytes) + profile.link.back_seconds(bytes) : kInfinity;
}

std::vector<double> own_seconds(const StepSimulator& simulator, const std::vector<bool>& saved) {
  const StepProfile& profile = simulator.profile();
  std::vector<double> seconds(saved.size(), 0);
  for (const ProfiledOperator& op : profile.operators) {
    std::vector<int> written;
    for (const ValueId& value : op.writes) {
      if (saved[static_cast<size_t>(value.storage)]) {
        written.push_back(value.storage);
      }
    }
    std::sort(written.begin(), written.end());
    written.erase(std::unique(written.begin(), written.end()), written.end());
    for (const int s : written) {
      const bool possible = op.replayable && profile.storages[static_cast<size_t>(s)].kind == StorageKind::Activation;
      seconds[static_cast<size_t>(s)] += possible ? op.seconds / static_cast<double>(written.size()) : kInfinity;
    }
  }
  return seconds;
}

// What else has to run for a storage: see the top of this file.
class Feeders {
 public:
  Feeders(const StepSimulator& simulator, const std::vector<bool>& saved)
      : simulator_(simulator),
        profile_(simulator.profile()),
        saved_(saved),
        reader_(saved.size(), kNobody),
        dropped_(saved.size(), 0) {
    for (int i = 0; i < static_cast<int>(profile_.operators.size()); ++i) {
      for (const ValueId& value : simulator_.needs(i)) {
        int& reader = reader_[at(value.storage)];
        reader = reader == kNobody || reader == i ? i : kMany;
      }
    }
    for (int e = 0; e < static_cast<int>(profile_.events.size()); ++e) {
      if (profile_.events[at(e)].kind == EventKind::Drop) {
        dropped_[at(profile_.events[at(e)].index)] = e + 1;
      }
    }
  }

  /// `gone`: the first event in which storage `s` may be absent.
  double seconds(int s, int gone) const {
    const int op = only_maker(s);
    return op < 0 || saved_results(op) != 1 ? 0 : inputs_of(op, profile_.storages[at(s)].bytes, gone);
  }

 private:
  static constexpr int kNobody = -1;
  static constexpr int kMany = -2;

  double inputs_of(int op, int64_t bytes, int gone) const {
    double seconds = 0;
    for (const ValueId& value : simulator_.needs(op)) {
      const int s = value.storage;
      const int maker = only_maker(s);
      if (maker >= 0 && !saved_[at(s)] && reader_[at(s)] == op && profile_.storages[at(s)].bytes >= bytes &&
          dropped_[at(s)] > 0 && dropped_[at(s)] <= gone && profile_.operators[at(maker)].writes.size() == 1) {
        seconds += profile_.operators[at(maker)].seconds + inputs_of(maker, bytes, gone);
      }
    }
    return seconds;
  }

  // The operator that made the one version of a storage there is; -1 if it is not that simple.
  int only_maker(int s) const {
    return profile_.storages[at(s)].kind == StorageKind::Activation && simulator_.last_version(s) == 0
               ? simulator_.producer({s, 0})
               : -1;
  }

  int saved_results(int op) const {
    int count = 0;
    for (const ValueId& value : profile_.operators[at(op)].writes) {
      count += saved_[at(value.storage)] ? 1 : 0;
    }
    return count;
  }

  const StepSimulator& simulator_;
  const StepProfile& profile_;
  const std::vector<bool>& saved_;
  std::vector<int> reader_;   // per storage: the operator that needs it, if it is one
  std::vector<int> dropped_;  // the event after which the program has let go of it; 0: it never does
};

// In the order of seconds a byte.
std::vector<Droppable> droppables(const StepSimulator& simulator) {
  const StepProfile& profile = simulator.profile();
  const std::vector<bool> saved = profile.saved_storages();
  const std::vector<double> seconds = own_seconds(simulator, saved);
  std::vector<Droppable> result;
  std::vector<int> place(saved.size(), -1);
  for (size_t s = 0; s < saved.size(); ++s) {
    const bool may_be_absent = seconds[s] < kInfinity || profile.link.is_open();
    if (saved[s] && may_be_absent && profile.storages[s].bytes > 0) {
      place[s] = static_cast<int>(result.size());
      result.push_back({static_cast<int>(s), profile.storages[s].bytes, seconds[s], {}});
    }
  }
  std::vector<int> users(saved.size(), 0);  // the program, and uses by the backward pass
  std::vector<int> gone(saved.size(), -1);
  const auto change = [&](int s, int by, int event) {
    const size_t i = static_cast<size_t>(s);
    if (place[i] < 0) {
      return;
    }
    if (users[i] == 0 && gone[i] >= 0) {
      result[static_cast<size_t>(place[i])].gaps.emplace_back(gone[i], event);
    }
    users[i] += by;
    gone[i] = users[i] == 0 ? event : -1;
  };
  for (int e = 0; e < static_cast<int>(profile.events.size()); ++e) {
    const ProfileEvent& event = profile.events[static_cast<size_t>(e)];
    if (event.kind == EventKind::Forward) {
      for (const ValueId& value : profile.operators[static_cast<size_t>(event.index)].writes) {
        change(value.storage, value.version == 0 ? 1 : 0, e);
      }
    } else if (event.kind == EventKind::Unpack) {
      change(event.index, 1, e);
    } else if (event.kind == EventKind::Drop || event.kind == EventKind::Done) {
      change(event.index, -1, e);
    }
  }
  const Feeders feeders(simulator, saved);
  for (Droppable& one : result) {
    one.seconds += one.gaps.empty() ? 0 : feeders.seconds(one.storage, one.gaps.front().first);
    one.seconds = std::min(one.seconds, transfer_seconds(profile, static_cast<size_t>(one.storage)));
  }
  std::stable_sort(result.begin(), result.end(), [](const Droppable& a, const Droppable& b) {
    return a.seconds * static_cast<double>(b.bytes) < b.seconds * static_cast<double>(a.bytes);
  });
  return result;
}

// What may be absent during one event, as a tree of sums over all droppables in their order: so a change, and the cheapest fractional choice
// that makes up so many bytes, take as many steps as the tree is deep.
class CheapestCover {
 public:
  explicit CheapestCover(const std::vector<Droppable>& ranked) : ranked_(ranked) {
    while (leaves_ < ranked.size()) {
      leaves_ *= 2;
    }
    sums_.resize(2 * leaves_);
  }

  void put_in(size_t i) { set(i, {ranked_[i].bytes, ranked_[i].seconds}); }
  void take_out(size_t i) { set(i, {}); }

  double seconds_for(int64_t bytes) const {
    if (bytes <= 0) {
      return 0;
    }
    if (sums_[1].bytes < bytes) {
      return kInfinity;
    }
    double seconds = 0;
    size_t node = 1;
    while (node < leaves_) {
      node *= 2;
      if (sums_[node].bytes < bytes) {
        bytes -= sums_[node].bytes;
        seconds += sums_[node].seconds;
        ++node;
      }
    }
    return seconds + sums_[node].seconds * static_cast<double>(bytes) / static_cast<double>(sums_[node].bytes);
  }

 private:
  struct Sum {
    int64_t bytes = 0;
    double seconds = 0;
  };

  void set(size_t i, Sum sum) {
    size_t node = leaves_ + i;
    sums_[node] = sum;
    for (node /= 2; node > 0; node /= 2) {
      sums_[node] = {sums_[2 * node].bytes + sums_[2 * node + 1].bytes,
                     sums_[2 * node].seconds + sums_[2 * node + 1].seconds};
    }
  }

  const std::vector<Droppable>& ranked_;
  size_t leaves_ = 1;
  std::vector<Sum> sums_;  // the root is number 1, the children of n are 2 n and 2 n + 1
};

}  // namespace

double lower_bound_seconds(const StepSimulator& simulator, int64_t budget) {
  const Simulation plain = simulator.run(keep_all(simulator.profile()));
  const std::vector<Droppable> ranked = droppables(simulator);
  std::vector<std::vector<size_t>> begins(plain.high.size() + 1), ends(plain.high.size() + 1);
  for (size_t i = 0; i < ranked.size(); ++i) {
    for (const auto& [first, last] : ranked[i].gaps) {
      begins[static_cast<size_t>(first)].push_back(i);
      ends[static_cast<size_t>(last) + 1].push_back(i);
    }
  }
  CheapestCover absent(ranked);
  double most = 0;
  for (size_t e = 0; e < plain.high.size(); ++e) {
    for (const size_t i : ends[e]) {
      absent.take_out(i);
    }
    for (const size_t i : begins[e]) {
      absent.put_in(i);
    }
    most = std::max(most, absent.seconds_for(plain.high[e] - budget));
  }
  return plain.seconds + most;
}

namespace {

class BranchAndBound {
 public:
  BranchAndBound(const StepSimulator& simulator, int64_t budget)
      : simulator_(simulator), budget_(budget), plan_(keep_all(simulator.profile())) {
    const StepProfile& profile = simulator.profile();
    const std::vector<bool> saved = profile.saved_storages();
    own_ = own_seconds(simulator, saved);
    if (profile.link.is_open()) {
      ways_.push_back(Stay::offloaded());
    }
    for (size_t s = 0; s < saved.size(); ++s) {
      if (profile.storages[s].kind != StorageKind::External) {
        order_.push_back(static_cast<int>(s));
      }
    }
    if (order_.size() > 16) {
      throw ConfigError(fmt::format("solve_exactly: {} storages are more than 16; use PlanSolver", order_.size()));
    }
    best_seconds_ = kInfinity;
    smallest_ = std::numeric_limits<int64_t>::max();
    branch(0, profile.plain_seconds());
  }

  PlanAnswer answer() const {
    if (best_.empty()) {
      return Infeasible{smallest_};
    }
    const Simulation run = simulator_.run(best_);
    const Simulation plain = simulator_.run(keep_all(simulator_.profile()));
    return RematPlan{best_, run.peak_bytes, run.seconds, plain.peak_bytes, plain.seconds, run.seconds};
  }

 private:
  // `bound`: seconds that all plans below this branch take at least. What nothing keeps is never the cheaper for it.
  void branch(size_t depth, double bound) {
    if (bound >= best_seconds_) {
      return;
    }
    if (depth == order_.size()) {
      const Simulation run = simulator_.run(plan_);
      if (run.impossible < 0) {
        smallest_ = std::min(smallest_, run.peak_bytes);
        if (run.peak_bytes <= budget_ && run.seconds < best_seconds_) {
          best_seconds_ = run.seconds;
          best_ = plan_;
        }
      }
      return;
    }
    const size_t s = static_cast<size_t>(order_[depth]);
    const Stay before = plan_[s];
    const double away = std::min(own_[s], transfer_seconds(simulator_.profile(), s));  // it may be rebuilt with another
    for (const Stay choice : ways_) {
      plan_[s] = choice;
      // A saved storage may stay in the program's hands until the backward pass: then it costs nothing to drop it.
      branch(depth + 1, bound + (choice == Stay::kept() || !gone(s) ? 0
                                 : choice == Stay::offloaded()      ? away
                                                                    : own_[s]));
    }
    plan_[s] = before;
  }

  bool gone(size_t s) {
    if (gone_.empty()) {
      gone_.assign(plan_.size(), false);
      for (const Droppable& one : droppables(simulator_)) {
        gone_[static_cast<size_t>(one.storage)] = !one.gaps.empty();
      }
    }
    return gone_[s];
  }

  const StepSimulator& simulator_;
  int64_t budget_;
  Stays plan_, best_;
  std::vector<int> order_;
  std::vector<Stay> ways_ = {Stay::kept(), Stay::once_rebuilt(), Stay::never()};
  std::vector<double> own_;
  std::vector<bool> gone_;
  double best_seconds_ = 0;
  int64_t smallest_ = 0;
};

}  // namespace

PlanAnswer solve_exactly(const StepSimulator& simulator, int64_t budget) {
  return BranchAndBound(simulator, budget).answer();
}

}  // namespace snug::plan
