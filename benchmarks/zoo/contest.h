#pragma once
// Contest: one model's step in many ways, plainly, under plans, and within fewer bytes by hand. Each way's bits and bytes are compared with those
// of the plain step, and its time with a plain step beside it.

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/zoo/entry.h"
#include "snug/activations/checkpoint.h"
#include "snug/core/error.h"
#include "snug/memory/meter.h"
#include "snug/remat/rematerialize.h"

namespace snug::zoo {

/// A way to make the step, and what was found of it.
struct Way {
  std::string name;
  Run run = run_plainly;
  int64_t micro_batches = 1;
  std::optional<ActivationPlan> plan = {};
  double planning_seconds = 0;  ///< search alone; with a step that verifies where `corrected`
  bool corrected = false;  ///< plan_activations found that the plan did not come out as predicted, and made another
  int rival = -1;          ///< index of the way by hand whose bytes the plan may take

  int64_t peak_bytes = 0;
  int64_t replayed = 0;
  bool same_bits = true;  ///< of loss and gradients; not of several micro-batches, which are summed in another order
  std::vector<double> ratios = {};  ///< of its time to a plain step's, sorted

  double ratio() const { return ratios.empty() ? 0 : ratios[ratios.size() / 2]; }
};

inline double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Contest {
 public:
  explicit Contest(Entry entry) : entry_(std::move(entry)), leaves_(entry_.module->parameters()) {
    step(ways[0]);  // what is made once
    inspect(ways[0]);
    ways.push_back({.name = "plain again"});
    inspect(ways[1]);
    drop_gradients();
    profile_seconds = seconds_of([&] { profile = profile_step(forward()); });
  }

  /// Comes before any plan.
  void find_floor() {
    floor_seconds = seconds_of([&] {
      try {
        const ActivationPlan least(profile, Bytes(1));
      } catch (const BudgetExceeded& error) {
        floor_bytes = error.smallest_feasible().count();
      }
    });
  }

  void add_by_hand() {
    const int64_t parts = number_of_parts();
    const size_t first = ways.size();
    for (int64_t length = 1; length < parts; length *= 2) {
      add({.name = length == 1 ? "checkpoint of each part" : fmt::format("checkpoint of each {} parts", length),
           .run = checkpoint_each(length)});
    }
    if (entry_.splits_over_batch && entry_.batch[0].size(0) % 2 == 0) {
      add({.name = "two micro-batches", .micro_batches = 2});
    }
    for (size_t rival = first, end = ways.size(); rival < end; ++rival) {
      add_plan("plan in the bytes of " + ways[rival].name, ways[rival].peak_bytes, static_cast<int>(rival));
    }
  }

  /// Within `bytes`, or within the fewest that can be planned if those are more.
  void add_plan(const std::string& name, int64_t bytes, int rival = -1) {
    const Bytes budget(std::max(bytes, floor_bytes));
    Way way{.name = name, .rival = rival};
    way.planning_seconds = seconds_of([&] { way.plan = ActivationPlan(profile, budget); });
    inspect(way);
    if (!way.same_bits || way.peak_bytes > way.plan->predicted_peak_bytes) {
      way.corrected = true;
      drop_gradients();
      way.planning_seconds += seconds_of([&] { way.plan = plan_activations(profile, forward(), budget); });
      inspect(way);
    }
    ways.push_back(std::move(way));
  }

  /// Each way takes turns with plain steps.
  void race(int turns) {
    for (int turn = 0; turn < turns; ++turn) {
      for (Way& way : ways) {
        const bool plain_first = turn % 2 == 0;
        const double before = seconds_of([&] { step(plain_first ? ways[0] : way); });
        const double after = seconds_of([&] { step(plain_first ? way : ways[0]); });
        way.ratios.push_back(plain_first ? after / before : before / after);
        plain_seconds = std::min({plain_seconds, plain_first ? before : after});
      }
    }
    for (Way& way : ways) {
      std::sort(way.ratios.begin(), way.ratios.end());
    }
  }

  const std::string& name() const { return entry_.name; }

  std::vector<Way> ways{{.name = "plain"}};
  StepProfile profile;
  double profile_seconds = 0;
  double floor_seconds = 0;  ///< to find floor_bytes
  int64_t floor_bytes = 0;   ///< the smallest budget for which a plan was found
  double plain_seconds = 1e9;

 private:
  std::function<Tensor()> forward() const {
    return [this] { return entry_.loss_of(entry_.batch, run_plainly); };
  }

  static Run checkpoint_each(int64_t length) {
    return [length](const Parts& parts, State state) {
      for (auto part = parts.begin(); part != parts.end();) {
        const auto end = part + std::min<int64_t>(length, parts.end() - part);
        state = checkpoint([group = Parts(part, end)](State x) { return run_plainly(group, std::move(x)); },
                           std::move(state));
        part = end;
      }
      return state;
    };
  }

  int64_t number_of_parts() const {
    int64_t parts = 0;
    entry_.loss_of(entry_.batch, [&](const Parts& all, State state) {
      parts += std::ssize(all);
      return run_plainly(all, std::move(state));
    });
    return parts;
  }

  void add(Way way) {
    inspect(way);
    ways.push_back(std::move(way));
  }

  void drop_gradients() {
    for (Tensor& leaf : leaves_) {
      leaf.mutable_grad() = Tensor();
    }
  }

  Tensor step(const Way& way, int64_t* replayed = nullptr) {
    drop_gradients();
    torch::manual_seed(2);
    Tensor sum;
    for (int64_t i = 0; i < way.micro_batches; ++i) {
      Batch micro;
      for (const Tensor& tensor : entry_.batch) {
        micro.push_back(way.micro_batches == 1 ? tensor : tensor.chunk(way.micro_batches)[static_cast<size_t>(i)]);
      }
      std::optional<Rematerialize> scope;
      if (way.plan) {
        scope.emplace(*way.plan);
      }
      Tensor loss = entry_.loss_of(micro, way.run);
      if (way.micro_batches > 1) {
        loss = loss / way.micro_batches;
      }
      const auto count = scope ? scope->replayed_operators() : nullptr;
      scope.reset();
      loss.backward();
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
      if (replayed && count) {
        *replayed = *count;
      }
    }
    return sum;
  }

  void inspect(Way& way) {
    drop_gradients();
    const MemoryMeter meter;
    Tensor loss = step(way, &way.replayed);
    way.peak_bytes = meter.report().peak_bytes;
    std::vector<Tensor> bits{loss.clone()};
    for (const Tensor& leaf : leaves_) {
      bits.push_back(leaf.grad().defined() ? leaf.grad().clone() : Tensor());
    }
    if (plain_bits_.empty()) {
      plain_bits_ = std::move(bits);
      return;
    }
    way.same_bits = std::equal(bits.begin(), bits.end(), plain_bits_.begin(), [](const Tensor& a, const Tensor& b) {
      return a.defined() == b.defined() && (!a.defined() || a.equal(b));
    });
  }

  Entry entry_;
  std::vector<Tensor> leaves_;
  std::vector<Tensor> plain_bits_;
};

}  // namespace snug::zoo
