#pragma once
// StepWithinBudget: keeps memory_budget in a Stepper: plans, runs forward under the plan, and makes a step that runs out of memory again, from where
// it began, under a plan that takes less. Where plans() is false, only forward() and finish() are called, and do nothing of their own.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "snug/accumulation/loss.h"
#include "snug/core/error.h"
#include "snug/core/rng.h"
#include "snug/train/detail/step_planner.h"
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
  StepWithinBudget(torch::nn::Module& model, Bytes budget, bool splits_batch_norm) : backup_(model) {
    if (!budget.is_unlimited()) {
      planner_.emplace(budget, splits_batch_norm);
    }
  }

  bool plans() const { return planner_.has_value(); }
  const StepPlan* last_plan() const { return planner_ ? planner_->last() : nullptr; }
  StepPlanner& planner() { return *planner_; }
  const StepPlanner& planner() const { return *planner_; }

  /// Room for what a step needs beside its tensors: loss sums, scales, states of generators; and, while it is planned, more copies of buffers.
  int64_t own_bytes() const { return backup_.bytes() + (16 << 10); }

  /// Before run(): remembers where the step begins.
  void begin() { backup_.take(); }

  /// `is_repeatable`: nothing else depends on a failed try. `is_updating`: whether a try may have written parameters, after which nothing is put
  /// back or repeated.
  template <class Step>
  auto run(Step&& step, bool is_repeatable, const bool& is_updating) -> decltype(step()) {
    for (;;) {
      try {
        return step();
      } catch (const BudgetExceeded&) {
        const bool had_other_operators = !std::exchange(deviation_, {}).empty();
        const bool can_take_less = !is_updating && planner_->step_down(had_other_operators);
        restore(is_updating);
        if (!is_repeatable || !can_take_less || ++step_downs_ > kMostStepDowns) {
          step_downs_ = 0;
          throw;
        }
      } catch (...) {
        deviation_.clear();
        restore(is_updating);
        throw;
      }
    }
  }

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
    if (!result.plan_deviation.empty()) {
      planner_->forget();
    }
  }

 private:
  static constexpr int kMostStepDowns = 4;

  void restore(bool is_updating) const {
    if (!is_updating) {
      backup_.restore();
    }
  }

  void note_deviation(const Rematerialize& scope) {
    if (deviation_.empty()) {
      deviation_ = scope.deviation();
    }
  }

  std::optional<StepPlanner> planner_;
  StepBackup backup_;
  int64_t step_downs_ = 0;
  std::string deviation_;
};

}  // namespace snug::detail
