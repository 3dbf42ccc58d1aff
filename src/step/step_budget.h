#pragma once
// StepBudget: keeps memory_budget: the plan, forward under the plan, and the way back to the beginning of a step that
// ran out of memory. Where plans() is false, the budget is a limit.

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "snug/accumulation.h"
#include "snug/step_plan.h"
#include "src/remat/effect_journal.h"
#include "src/step/model_place.h"
#include "src/step/ranked_step.h"
#include "src/step/state_place.h"
#include "src/step/step_planner.h"
#include "src/step/stepper_options.h"
#include "src/step/trained_parameters.h"

namespace snug::detail {

class StepBudget {
 public:
  /// Who can make again a call that ran out of memory. Several ranks only if the call is a whole step, as else some
  /// would hear of it in a later one; nobody where earlier micro-batches went before, which cannot be had again.
  enum class Repeats { Never, Alone, OnAllRanks };

  StepBudget(torch::nn::Module& model, torch::optim::Optimizer& optimizer, const StepperOptions& options,
             RankedStep& ranks, TrainedParameters& parameters);

  /// Throws BudgetExceeded, on all ranks, if more than the budget is alive already on one; Error if one cannot use its
  /// directory for offload.
  void check() const;

  /// The smallest of all ranks.
  Bytes limit() const { return budget_; }
  bool plans() const { return planner_.has_value(); }
  const StepPlan* last_plan() const { return planner_ ? planner_->last() : nullptr; }
  int64_t slices() const { return last_plan() == nullptr ? 1 : last_plan()->slices; }
  StepPlanner& planner() { return *planner_; }
  const StepPlanner& planner() const { return *planner_; }

  /// Where the optimizer's state is: in a file if it can, until a plan says otherwise.
  StatePlace& state_place() { return state_place_; }
  /// Where the model is: in memory if it fits there, until a plan says otherwise.
  ModelPlace& model_place() { return model_place_; }

  /// Room for what a step needs beside its tensors: loss sums, scales, states of generators.
  int64_t own_bytes() const;

  /// The plan for a step, the same micro-batch on all ranks. Null where it has no items.
  const StepPlan* plan(StepToPlan step);
  /// The plan of this rank alone.
  const StepPlan* plan_here(const StepToPlan& step);

  /// Forgets how the last window went.
  void forget_tries();
  /// A planned step begins here: until its journal ends, all that it changes outside of itself can be taken back.
  void begin_step();
  /// It is to end before parameters are written. The step is not repeated then.
  EffectJournal& journal() { return journal_; }
  /// Out of memory: the plan is to take less, or to be made anew (plan_life.h). True: the step can be made again with
  /// it, if `repeats` allows.
  bool take_less(Repeats repeats);
  /// Takes back what the step has changed outside of itself, unless parameters were written.
  void go_back();
  /// The step will be made again.
  void count_step_down() { ++tries_.step_downs; }
  /// It will not: plans are as before it.
  void give_up();

  /// Runs `forward` under the last plan.
  Loss forward(const std::function<Loss()>& forward);

  /// At the end of a step: says what was not as planned.
  void finish(StepResult& result);

 private:
  PlanEvent no_room() const;

  RankedStep& ranks_;
  TrainedParameters& parameters_;
  Bytes budget_;  // the smallest of all ranks
  StatePlace state_place_;
  ModelPlace model_place_;
  std::optional<StepPlanner> planner_;
  std::exception_ptr no_link_;  // why it cannot be used for offload
  torch::nn::Module& model_;
  std::vector<at::Tensor*> carried_;
  EffectJournal journal_;  // open until parameters are written
  struct Tries {
    int64_t step_downs = 0;
    std::string deviation = {};
    bool follows_plan = true;  // but for results that are larger
  } tries_;                    // of the step or window
};

}  // namespace snug::detail
