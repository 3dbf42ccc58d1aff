#pragma once
// StepWithinBudget: keeps memory_budget in a Stepper: plans, runs forward under the plan, and makes a step that runs out of memory again, from where
// it began, under a plan that takes less. Several ranks do so together. Where plans() is false, it is a limit.

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "snug/accumulation/loss.h"
#include "snug/core/error.h"
#include "snug/core/rng.h"
#include "snug/memory/limit.h"
#include "snug/train/detail/ranked_step.h"
#include "snug/train/detail/step_planner.h"
#include "snug/train/detail/stepper_options.h"
#include "snug/train/detail/trained_parameters.h"
#include "snug/train/step_result.h"

namespace snug::detail {

/// What a forward pass changes besides gradients: buffers and the default generators.
class StepBackup {
 public:
  explicit StepBackup(torch::nn::Module& model) : model_(model) {}
  void take();
  void restore() const;
  int64_t bytes() const;

 private:
  torch::nn::Module& model_;
  std::optional<RngState> generators_;
  std::vector<at::Tensor> buffers_, copies_;
};

class StepWithinBudget {
 public:
  /// Who can make again a call that ran out of memory. Several ranks only if the call is a whole step, as else some would hear of it in a
  /// later one; nobody where earlier micro-batches went before, which cannot be had again.
  enum class Repeats { Never, Alone, OnAllRanks };

  /// `abandon`: drops what a failed try has left, gradients first of all.
  StepWithinBudget(torch::nn::Module& model, const StepperOptions& options, RankedStep& ranks,
                   TrainedParameters& parameters, std::function<void()> abandon);

  /// Throws BudgetExceeded, on all ranks, if more than the budget is alive already on one; Error if one cannot use its directory for offload.
  void check() const;

  bool plans() const { return planner_.has_value(); }
  const StepPlan* last_plan() const { return planner_ ? planner_->last() : nullptr; }
  int64_t slices() const { return last_plan() == nullptr ? 1 : last_plan()->slices; }
  StepPlanner& planner() { return *planner_; }
  const StepPlanner& planner() const { return *planner_; }

  /// Room for what a step needs beside its tensors: loss sums, scales, states of generators; and, while it is planned, more copies of buffers.
  int64_t own_bytes() const { return backup_.bytes() + (16 << 10); }

  /// The plan for a step, the same micro-batch on all ranks. Null where it has no items.
  const StepPlan* plan(StepToPlan step);
  /// The plan of this rank alone.
  const StepPlan* plan_here(const StepToPlan& step);

  /// Runs a part of a step under the limit. If it fails, gradients are dropped and the other ranks hear of it.
  template <class F>
  auto guarded(F&& part) -> decltype(part()) {
    return guarded(part, Repeats::Never, /*takes_less=*/false);
  }

  /// Runs what plans and makes a step, or adds to it; where there is a plan, again if it runs out of memory, from where it began.
  template <class F>
  auto run(Repeats repeats, F&& step) -> decltype(step()) {
    if (!planner_) {
      return guarded(step);
    }
    if (repeats != Repeats::Never) {  // the last window may have been dropped
      step_downs_ = 0;
      deviation_.clear();
    }
    is_writing_ = false;
    begin_try(repeats);
    guarded([&] { backup_.take(); });
    for (;;) {
      try {
        return guarded(step, repeats, /*takes_less=*/true);
      } catch (...) {
        restore();
        if (!is_again_) {
          planner_->give_up();
          throw;
        }
        ++step_downs_;
      }
      begin_try(repeats);
    }
  }

  /// Parameters are written from here on: nothing is put back in this step any more, nor is it repeated.
  void begin_writing() { is_writing_ = true; }

  /// Runs `forward`, which returns a Loss, under the last plan.
  template <class F>
  Loss forward(F&& forward) {
    const StepPlan* plan = last_plan();
    if (plan == nullptr || !plan->activations) {
      return forward();
    }
    const Rematerialize scope(*plan->activations);
    try {
      Loss loss = forward();
      note_deviation(scope);
      return loss;
    } catch (...) {
      note_deviation(scope);
      throw;
    }
  }

  /// At the end of a step: says what was not as planned. Then that is forgotten, with the plan.
  void finish(StepResult& result) {
    result.step_downs = std::exchange(step_downs_, 0);
    result.plan_deviation = std::exchange(deviation_, {});
    if (planner_) {
      planner_->settle();
    }
    if (!result.plan_deviation.empty()) {
      planner_->forget();
    }
  }

 private:
  static constexpr int kMostStepDowns = 4;

  template <class F>
  auto guarded(F&& part, Repeats repeats, bool takes_less) -> decltype(part()) {
    using Failure = RankedStep::Failure;
    try {
      check_budget(budget_, parameters_.device());
      const MemoryLimit limit(parameters_.device(), budget_);
      return part();
    } catch (const c10::OutOfMemoryError& error) {
      give_up(takes_less ? after_memory(repeats) : Failure::Memory);
      if (budget_.is_unlimited()) {
        throw;
      }
      throw BudgetExceeded(fmt::format("Stepper.step: the step does not fit into memory_budget {}: {}", budget_.str(),
                                       error.what_without_backtrace()));
    } catch (const BudgetExceeded& error) {
      give_up(takes_less ? after_memory(repeats) : Failure::Memory, error.smallest_feasible());
      throw;
    } catch (const DistributedError&) {
      give_up(Failure::Group);
      throw;
    } catch (...) {
      give_up(Failure::Other);
      throw;
    }
  }

  RankedStep::Failure after_memory(Repeats repeats);
  void give_up(RankedStep::Failure failure, Bytes smallest = Bytes(0));
  void begin_try(Repeats repeats);
  void restore();

  void note_deviation(const Rematerialize& scope) {
    if (deviation_.empty()) {
      deviation_ = scope.deviation();
    }
  }

  RankedStep& ranks_;
  TrainedParameters& parameters_;
  std::function<void()> abandon_;
  Bytes budget_;  // the smallest of all ranks
  std::optional<StepPlanner> planner_;
  std::exception_ptr no_link_;  // why it cannot be used for offload
  StepBackup backup_;
  bool is_writing_ = false;
  bool is_again_ = false;  // what was given up last is to be made again
  int64_t step_downs_ = 0;
  std::string deviation_;
};

}  // namespace snug::detail
