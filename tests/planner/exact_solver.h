#pragma once
// The fastest of all plans of a small step, to compare with what plan::Solver finds.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "src/planner/droppables.h"
#include "src/planner/solver.h"

namespace snug::testing {

class BranchAndBound {
 public:
  BranchAndBound(const plan::Simulator& simulator, int64_t budget)
      : simulator_(simulator), budget_(budget), plan_(plan::keep_all(simulator.profile())) {
    const plan::Profile& profile = simulator.profile();
    const std::vector<bool> saved = profile.saved_storages();
    own_ = plan::own_seconds(simulator, saved);
    if (profile.link.is_open()) {
      ways_.push_back(plan::Stay::offloaded());
      ways_.push_back(plan::Stay::streamed());
    }
    for (size_t s = 0; s < saved.size(); ++s) {
      if (profile.storages[s].kind != plan::StorageKind::External) {
        order_.push_back(static_cast<int>(s));
      }
    }
    best_seconds_ = std::numeric_limits<double>::infinity();
    smallest_ = std::numeric_limits<int64_t>::max();
    branch(0, profile.plain_seconds());
  }

  plan::Answer answer() const {
    if (best_.empty()) {
      return plan::Infeasible{smallest_};
    }
    const plan::Simulation run = simulator_.run(best_);
    const plan::Simulation plain = simulator_.run(plan::keep_all(simulator_.profile()));
    return plan::Solution{best_, run.peak_bytes, run.seconds, plain.peak_bytes, plain.seconds, run.seconds};
  }

 private:
  // `bound`: seconds that all plans below this branch take at least. What nothing keeps is never the cheaper for it.
  void branch(size_t depth, double bound) {
    if (bound >= best_seconds_) {
      return;
    }
    if (depth == order_.size()) {
      const plan::Simulation run = simulator_.run(plan_);
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
    const plan::Stay before = plan_[s];
    const double away =
        std::min(own_[s], plan::least_transfer_seconds(simulator_.profile()));  // it may be rebuilt with another
    for (const plan::Stay choice : ways_) {
      plan_[s] = choice;
      // A saved storage may stay in the program's hands until the backward pass: then it costs nothing to drop it.
      branch(depth + 1, bound + (choice == plan::Stay::kept() || !gone(s) ? 0 : choice.leaves() ? away : own_[s]));
    }
    plan_[s] = before;
  }

  bool gone(size_t s) {
    if (gone_.empty()) {
      gone_.assign(plan_.size(), false);
      for (const plan::Droppable& one : plan::droppables(simulator_)) {
        gone_[static_cast<size_t>(one.storage)] = !one.gaps.empty();
      }
    }
    return gone_[s];
  }

  const plan::Simulator& simulator_;
  int64_t budget_;
  plan::Stays plan_, best_;
  std::vector<int> order_;
  std::vector<plan::Stay> ways_ = {plan::Stay::kept(), plan::Stay::once_rebuilt(), plan::Stay::never()};
  std::vector<double> own_;
  std::vector<bool> gone_;
  double best_seconds_ = 0;
  int64_t smallest_ = 0;
};

/// Of all plans that keep each storage, hold it once it is rebuilt, never hold it or, with a link, offload it. It takes
/// time in powers of their number.
inline plan::Answer solve_exactly(const plan::Simulator& simulator, int64_t budget) {
  return BranchAndBound(simulator, budget).answer();
}

}  // namespace snug::testing
