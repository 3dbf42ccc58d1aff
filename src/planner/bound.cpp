#include "src/planner/bound.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "src/planner/droppables.h"

// The bound is a relaxation of a covering problem. Plain training exceeds the budget by d(t) during event t. Under any
// plan, the storages that are absent during t have to make up d(t), and an absent saved storage must be rebuilt later:
// at least the operators that wrote the storage run once more (an operator that wrote several saved storages is shared
// out among them). So time rises at least by the cheapest fractional choice that covers d(t) (the fractional knapsack
// of Dantzig, 1957), for every t; the largest such rise is the bound.
//
// A rebuild needs other operators, too. Such an operator counts if it makes values for this rebuild alone, of no fewer
// bytes than the rebuilt storage: holding the values through t instead gives back nothing.
//
// The rebuild's own memory is ignored. If the profile has a link, storages may stream at no cost.

namespace snug::plan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The droppables that may be absent during an event, as a tree of sums over all droppables in their order. Both a
// change and the cheapest fractional choice that makes up so many bytes take as many steps as the tree is deep.
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

// Calls at(event) for each event. Before the call, put_in(i) is called for droppables that may be absent from the event
// on, and take_out(i) for droppables that may no longer be absent.
template <class PutIn, class TakeOut, class At>
void go_through_events(const std::vector<Droppable>& droppables, size_t events, const PutIn& put_in,
                       const TakeOut& take_out, const At& at) {
  std::vector<std::vector<size_t>> begins(events + 1), ends(events + 1);
  for (size_t i = 0; i < droppables.size(); ++i) {
    for (const auto& [first, last] : droppables[i].gaps) {
      begins[static_cast<size_t>(first)].push_back(i);
      ends[static_cast<size_t>(last) + 1].push_back(i);
    }
  }
  for (size_t e = 0; e < events; ++e) {
    std::ranges::for_each(ends[e], take_out);
    std::ranges::for_each(begins[e], put_in);
    at(e);
  }
}

}  // namespace

double lower_bound_seconds(const Simulator& simulator, int64_t budget) {
  const Simulation plain = simulator.run(keep_all(simulator.profile()));
  const std::vector<Droppable> ranked = plan::droppables(simulator);
  CheapestCover absent(ranked);
  double most = 0;
  go_through_events(
      ranked, plain.high.size(), [&](size_t i) { absent.put_in(i); }, [&](size_t i) { absent.take_out(i); },
      [&](size_t e) { most = std::max(most, absent.seconds_for(plain.high[e] - budget)); });
  const Profile& profile = simulator.profile();
  return profile.step_seconds(profile.operator_seconds() + most, /*has_tape=*/budget < plain.peak_bytes);
}

int64_t lower_bound_bytes(const Simulator& simulator) {
  const Simulation plain = simulator.run(keep_all(simulator.profile()));
  const std::vector<Droppable> droppables = plan::droppables(simulator);
  int64_t absent = 0, most = 0;
  go_through_events(
      droppables, plain.high.size(), [&](size_t i) { absent += droppables[i].bytes; },
      [&](size_t i) { absent -= droppables[i].bytes; },
      [&](size_t e) { most = std::max(most, plain.high[e] - absent); });
  return most;
}

}  // namespace snug::plan
