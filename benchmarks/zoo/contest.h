#pragma once
// Contest: one model's step in many ways: plain, under plans, and within fewer bytes by hand. The bits and the time of
// each way are compared with the bits and the time of plain steps.

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "benchmarks/zoo/entry.h"
#include "program/measure/measure.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "src/planner/bound.h"
#include "src/planner/search.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace snug::zoo {

/// A way to make the step, with the results.
struct Way {
  std::string name;
  Run run = run_plainly;
  int64_t micro_batches = 1;
  std::optional<ActivationPlan> plan = {};  ///< of each micro-batch
  int64_t predicted_peak_bytes = 0;         ///< 0: nothing was predicted
  double predicted_ratio = 0;
  double planning_seconds = 0;  ///< search alone; if `corrected`, with the step that verifies
  bool corrected = false;       ///< bits or peak were not as predicted, and plan_activations made another plan
  int rival = -1;               ///< index of the way by hand with the same bytes

  int64_t peak_bytes = 0;
  int64_t replayed = 0;
  bool same_bits = true;            ///< of loss and gradients, as of the same micro-batches without a plan
  std::vector<double> ratios = {};  ///< time of the way over time of a plain step, sorted

  double ratio() const { return ratios.empty() ? 0 : ratios[ratios.size() / 2]; }
};

/// What planning takes, and what comes of it.
struct Planning {
  double seconds = 0, plain_seconds = 0;  ///< of the processor; of a plain step
  std::string outcome = {};               ///< "micro-batches x items", or "refused"
};

inline double seconds_of(const std::function<void()>& work) { return measure::busy_seconds_of(torch::kCPU, work); }

class Contest {
 public:
  explicit Contest(Entry entry) : entry_(std::move(entry)), leaves_(entry_.module->parameters()) {
    step(ways[0]);  // makes what later steps keep
    for (int twice = 0; twice < 2; ++twice) {
      inspect(ways[0]);
    }
    drop_gradients();
    profile_seconds = seconds_of([&] { profile = detail::profile_step(forward()); });
  }

  /// Comes before any plan.
  void find_floor() {
    floor_seconds = seconds_of([&] {
      try {
        const ActivationPlan least = detail::unverified_plan(profile, Bytes(1));
      } catch (const BudgetExceeded& error) {
        floor_bytes = error.smallest_feasible().count();
      }
    });
    const plan::Simulator simulator(profile);
    least_bytes = lower_bound_bytes(simulator);
    at_floor = simulator.at_peak(plan::Solver(simulator).smallest().stays);
  }

  /// The time in which a Stepper plans its first step in `percent` of the bytes of a plain step, as a median.
  Planning time_planning(int percent, int turns) {
    SGD optimizer(leaves_, {.lr = 0});
    const bool splits = entry_.splits_over_batch;
    const snug::Batch batch(splits ? entry_.batch : Batch{entry_.batch[0]});
    const auto loss_of = [&](const snug::Batch& micro) {
      return splits ? Loss::mean(entry_.loss_of(micro.tensors(), run_plainly), micro.size())
                    : Loss::whole(entry_.loss_of(entry_.batch, run_plainly));
    };
    drop_gradients();
    const int64_t level = live_bytes(torch::kCPU).count();
    Planning planning;
    std::vector<double> seconds, plain_steps;
    for (int turn = 0; turn < turns; ++turn) {
      Stepper plain(*entry_.module, optimizer);
      StepResult result = plain.step(batch, loss_of);
      plain_steps.push_back(seconds_of([&] { result = plain.step(batch, loss_of); }));
      drop_gradients();
      const Bytes budget(level + (result.peak_bytes - level) * percent / 100);
      Stepper planned(*entry_.module, optimizer, {.budget = {.memory = budget}});
      seconds.push_back(seconds_of([&] {
        try {
          const StepChoice choice = planned.plan_for(batch, loss_of)->choice;
          planning.outcome = fmt::format("{} x {}", choice.micro_batches, choice.items);
        } catch (const BudgetExceeded&) {
          planning.outcome = "refused";
        }
      }));
      drop_gradients();
    }
    planning.seconds = measure::spread_of(seconds).median;
    planning.plain_seconds = measure::spread_of(plain_steps).low;
    return planning;
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
      if (ways[rival].micro_batches > 1) {
        add_choice(static_cast<int>(rival));
      }
    }
  }

  /// Within `bytes`, or within floor_bytes if floor_bytes are more.
  void add_plan(const std::string& name, int64_t bytes, int rival = -1) {
    const Bytes budget(std::max(bytes, floor_bytes));
    Way way{.name = name, .rival = rival};
    way.planning_seconds = seconds_of([&] { way.plan = detail::unverified_plan(profile, budget); });
    inspect(way);
    if (!way.same_bits || way.peak_bytes > way.plan->predicted_peak_bytes) {
      way.corrected = true;
      drop_gradients();
      way.planning_seconds += seconds_of([&] { way.plan = detail::plan_activations(profile, forward(), budget); });
      inspect(way);
    }
    way.predicted_peak_bytes = way.plan->predicted_peak_bytes;
    way.predicted_ratio = way.plan->predicted_seconds / way.plan->plain_seconds;
    ways.push_back(std::move(way));
  }

  /// A Stepper's choice: the faster of a plan for the batch and a plan for each half.
  void add_choice(int rival) {
    Way& halves = ways[static_cast<size_t>(rival)];
    const int64_t items = entry_.batch[0].size(0);
    step(halves);  // the gradients stay: the second half adds to the gradients of the first
    const plan::Profile of_half =
        detail::profile_step([&] { return entry_.loss_of(part_of_batch(2, 0), run_plainly); });
    plan::SearchOptions options{.batch = items, .budget = halves.peak_bytes};
    for (const Tensor& leaf : leaves_) {
      options.gradient_bytes += leaf.grad().defined() ? static_cast<int64_t>(leaf.grad().nbytes()) : 0;
    }
    const plan::Simulator whole(profile), half(of_half);
    const auto search = [&] {
      return plan::search({{.items = items, .simulator = &whole}, {.items = items / 2, .simulator = &half}}, options);
    };
    Way way{.name = "a Stepper's choice in the bytes of " + halves.name, .rival = rival};
    plan::Search found;
    way.planning_seconds = seconds_of([&] { found = search(); });
    if (!found.choice) {
      options.budget = found.smallest_feasible_bytes;
      found = search();
    }
    const plan::Choice& choice = found.choice.value();
    way.micro_batches = choice.micro_batches;
    way.predicted_peak_bytes = choice.peak_bytes;
    way.predicted_ratio = choice.seconds / whole.run(plan::keep_all(profile)).seconds;
    if (choice.plan.peak_bytes < choice.plan.plain_peak_bytes) {
      const int64_t gradients = choice.micro_batches > 1 ? options.gradient_bytes : 0;
      way.plan =
          detail::unverified_plan(choice.micro_batches > 1 ? of_half : profile, Bytes(options.budget - gradients));
      way.predicted_peak_bytes = way.plan->predicted_peak_bytes + gradients;
    }
    add(std::move(way));
  }

  /// Each way takes turns with plain steps. "plain" against plain steps shows how far ratios can be trusted.
  void race(int turns) {
    for (int turn = 0; turn < turns; ++turn) {
      for (Way& way : ways) {
        const bool plain_first = turn % 2 == 0;
        const double before = seconds_of([&] { step(plain_first ? ways[0] : way); });
        const double after = seconds_of([&] { step(plain_first ? way : ways[0]); });
        way.ratios.push_back(plain_first ? after / before : before / after);
        plain_seconds = std::min(plain_seconds, plain_first ? before : after);
      }
    }
    for (Way& way : ways) {
      std::sort(way.ratios.begin(), way.ratios.end());
    }
  }

  const std::string& name() const { return entry_.name; }

  std::vector<Way> ways{{.name = "plain"}};
  plan::Profile profile;
  double profile_seconds = 0;
  double floor_seconds = 0;  ///< to find floor_bytes
  int64_t floor_bytes = 0;   ///< the smallest budget for which a plan was found
  int64_t least_bytes = 0;   ///< proven: no plan takes fewer
  plan::AtPeak at_floor;     ///< alive at the peak of a plan in floor_bytes
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

  void drop_gradients() { measure::drop_gradients(leaves_); }

  Tensor step(Way& way) {
    drop_gradients();
    way.replayed = 0;
    torch::manual_seed(2);
    if (way.micro_batches == 1) {
      return pass(way, entry_.batch);
    }
    for (int64_t i = 0; i < way.micro_batches; ++i) {
      pass(way, part_of_batch(way.micro_batches, i));
    }
    return {};
  }

  Batch part_of_batch(int64_t parts, int64_t i) const {
    Batch part;
    for (const Tensor& tensor : entry_.batch) {
      part.push_back(tensor.chunk(parts)[static_cast<size_t>(i)]);
    }
    return part;
  }

  // Forward and backward. Returns the loss.
  Tensor pass(Way& way, const Batch& batch) {
    std::optional<Rematerialize> scope;
    if (way.plan) {
      scope.emplace(*way.plan);
    }
    const Tensor loss = entry_.loss_of(batch, way.run);
    const auto replayed = scope ? scope->replayed_operators() : nullptr;
    scope.reset();
    loss.backward(way.micro_batches == 1 ? Tensor() : torch::full({}, 1.0 / static_cast<double>(way.micro_batches)));
    way.replayed += replayed ? replayed->load() : 0;
    return loss.detach();
  }

  void inspect(Way& way) {
    drop_gradients();
    const MemoryMeter meter;
    std::vector<Tensor> bits{step(way)};
    way.peak_bytes = meter.report().peak_bytes;
    for (const Tensor& leaf : leaves_) {
      bits.push_back(leaf.grad());
    }
    way.same_bits = measure::same_bits(bits, bits_.try_emplace(way.micro_batches, bits).first->second);
  }

  Entry entry_;
  std::vector<Tensor> leaves_;
  // By the number of micro-batches, without a plan: loss, then gradients. Several micro-batches have no one loss.
  std::map<int64_t, std::vector<Tensor>> bits_;
};

}  // namespace snug::zoo
