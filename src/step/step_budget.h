#pragma once
// StepBudget keeps the budget: the plan, forward under the plan, and the return to the beginning of a step that ran
// out of memory. If is_planning() is false, the budget is a limit. step_budget.cpp opens with how a step is repeated.

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "src/step/check_options.h"
#include "src/step/places.h"
#include "src/step/step_planner.h"

namespace snug::detail {

class StepBudget {
 public:
  /// Who may repeat a call that ran out of memory:
  /// - OnAllRanks: all ranks, or a Stepper alone. The call must be a whole step; otherwise some ranks would learn of
  ///   the failure in a later call.
  /// - Alone: only a Stepper alone.
  /// - Never: earlier micro-batches of the window are accumulated, and cannot be computed again.
  enum class Repeats { Never, Alone, OnAllRanks };

  StepBudget(torch::nn::Module& model, torch::optim::Optimizer& optimizer, const StepperOptions& options,
             StepRanks& ranks, TrainedParameters& parameters);

  /// Weights leave, if they can and more than the budget is alive. Throws BudgetExceeded, on all ranks, if more than
  /// the budget is alive already on a rank; Error if a rank cannot use its directory for offload.
  void check();
  /// The windows of weights become as small as possible.
  void narrow_windows() {
    model_place_.put(model_place_.place());
    ranks_.widen_window(0);
  }

  /// The smallest budget of all ranks.
  Bytes limit() const { return budget_; }
  bool is_planning() const { return planner_.has_value(); }
  const StepPlan* last_plan() const { return planner_ ? planner_->last() : nullptr; }
  int64_t slices() const { return last_plan() == nullptr ? 1 : last_plan()->slices; }
  StepPlanner& planner() { return *planner_; }
  const StepPlanner& planner() const { return *planner_; }

  /// The place of the optimizer's state: in a file or on the host if possible, until a plan says otherwise.
  StatePlace& state_place() { return state_place_; }
  /// The place of the model: in memory if the model fits, until a plan says otherwise.
  ModelPlace& model_place() { return model_place_; }

  /// Room for small needs of a step besides its tensors: loss sums, scales, states of generators.
  int64_t own_bytes() const;
  /// Weights, gradients and optimizer state under a placement, as far as the parts can leave memory. The FP32 masters
  /// that the Stepper makes are weights.
  BytesByKind bytes(Placement placement) const;

  /// Bytes that an update allocates and frees again: with the state in memory, or where the program has put the state
  /// if no plan moves the state.
  int64_t workspace_bytes() const;

  /// Whether all ranks shard their weights in the next step, if they can: the choices are of a run with such weights.
  void ask_for_shards(bool asks) { asks_for_shards_ = asks; }
  /// The plan for a step, with the same micro-batch on all ranks. Null if the step has no items.
  const StepPlan* plan(StepToPlan step);
  /// The plan of this rank alone.
  const StepPlan* plan_here(const StepToPlan& step);

  /// Forgets the tries of the last window.
  void forget_tries();
  /// Begins a planned step: until the journal ends, all changes of the step outside of itself can be taken back.
  void begin_step();
  /// The journal must end before parameters are written. The step is not repeated afterwards.
  EffectJournal& journal() { return journal_; }
  /// Out of memory: has the plan take less, or has a new plan made (plan_life.h). True: the step can be repeated under
  /// the plan, and `repeats` allows the repetition.
  bool take_less(Repeats repeats);
  /// Takes back the changes of the step outside of itself, unless parameters were written.
  void go_back();
  /// The step will be repeated.
  void count_step_down() { ++tries_.step_downs; }
  /// The step will not be repeated: plans are as before the step.
  void give_up();

  /// Runs `forward` under the last plan.
  Loss forward(const std::function<Loss()>& forward);

  /// At the end of a step: tells how the step differed from the plan.
  void finish(StepResult& result);

 private:
  RankSplit plan_or_report(const StepToPlan& step);
  void end_trials(const StepToPlan& step);

  StepRanks& ranks_;
  TrainedParameters& parameters_;
  Bytes budget_;  // the smallest of all ranks
  StatePlace state_place_;
  ModelPlace model_place_;
  std::optional<StepPlanner> planner_;
  bool asks_for_shards_ = false;
  std::exception_ptr no_link_;  // why the link cannot be used for offload
  torch::nn::Module& model_;
  torch::optim::Optimizer& optimizer_;
  std::vector<at::Tensor*> carried_;
  EffectJournal journal_;  // open until parameters are written
  struct Tries {
    int64_t step_downs = 0;
    int64_t evicted_before = 0;  // bytes
    std::string deviation = {};
    bool follows_plan = true;  // larger results count as planned
  } tries_;                    // of the step or window
};

}  // namespace snug::detail
