#pragma once
// StepPlanner: the plans of a Stepper with a memory_budget. A plan is made when a shape of batch is first seen and kept for all that are no larger,
// up to a fifth: so batches of many lengths need few plans. step_trials.h has how one is found, step_choices.h what of it is saved.

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "snug/core/bytes.h"
#include "snug/step/detail/rank_split.h"
#include "snug/step/detail/step_choices.h"
#include "snug/step/detail/step_to_plan.h"
#include "snug/step/detail/step_trials.h"
#include "snug/step/step_plan.h"

namespace snug::detail {

class StepPlanner {
 public:
  /// `splits_batch_norm`: whether a batch may be cut though the model normalises by its statistics. `link`: over which plans may offload.
  StepPlanner(Bytes budget, bool splits_batch_norm, OffloadLink link = {}, c10::Device device = c10::kCPU)
      : limits_{budget.count(), splits_batch_norm, std::move(link), device} {}
  StepPlanner(const StepPlanner&) = delete;  // plans refer to its limits
  StepPlanner& operator=(const StepPlanner&) = delete;

  /// The plan for a step: one made earlier if it will do. Null within a window, if there is none for such a micro-batch. Throws
  /// BudgetExceeded, with the smallest budget that would do, if nothing fits.
  const StepPlan* plan(const StepToPlan& step);

  // On several ranks each calls look(), and then plan() until what they all said is settled, and then keep().
  /// What is known without trying anything.
  RankSplit look(const StepToPlan& step);
  /// What came of plan().
  RankSplit planned(const StepToPlan& step) const;
  /// The choice of all ranks is this one's.
  void keep(const StepToPlan& step, const AgreedSplit& agreed);

  /// Under the last plan a step ran out of memory: the next one is to leave some more free, or, if the step ran other operators than
  /// planned, is to be made anew. False: that will not do.
  bool step_down(bool had_other_operators);
  /// The step was made: the plan it was made under stays.
  void settle();
  /// It was not, however often it was made again: the plan is again what it was before that.
  void give_up();
  /// The last plan was for other operators than those that ran: it is to be made anew.
  void forget();

  /// A run that is resumed with them makes the same ones.
  std::string choices() const { return choices_.to_text(); }
  void set_choices(StepChoices choices);

  /// Null: there is none.
  const StepPlan* last() const { return last_ == nullptr ? nullptr : &last_->plan; }

 private:
  // What a step that runs out of memory changes.
  struct BeforeStepDown {
    int64_t left_free;
    int64_t at_most;
    StepPlan plan;
    StepChoices choices;
  };
  struct Known {
    StepTrials trials;
    StepPlan plan = {};
    bool is_stale = false;
    int64_t shared_batch = 0;                   // the largest that this choice was remembered for
    std::optional<BeforeStepDown> before = {};  // while the step is made again
  };

  Known* find(const StepToPlan& step);
  bool is_outdated(const Known& known, const StepToPlan& step) const;
  void choose(Known& known, const StepToPlan& step);

  PlanLimits limits_;
  std::list<Known> known_;
  StepChoices choices_;
  Known* last_ = nullptr;
  bool is_refused_ = false;  // there is no plan, so less cannot be asked of it
};

}  // namespace snug::detail
