#pragma once
// StepPlanner: the plans of a Stepper with a memory_budget. A plan is made when a shape of batch is first seen and kept
// for all that are no larger, up to a fifth: so batches of many lengths need few plans. step_trials.h has how one is
// found, step_choices.h what of it is saved with a run, and plan_file.h how all of them go to the next program.

#include <cstdint>
#include <filesystem>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "snug/core.h"
#include "snug/step_plan.h"
#include "src/step/plan_life.h"
#include "src/step/rank_verdict.h"
#include "src/step/step_choices.h"
#include "src/step/step_to_plan.h"
#include "src/step/step_trials.h"

namespace snug::detail {

class StepPlanner {
 public:
  /// `splits_batch_norm`: whether a batch may be cut though the model normalises by its statistics. `link`: over which
  /// plans may offload. `device`: whose memory the budget is of. `folder`: of the file of plans; empty: there is none.
  StepPlanner(Bytes budget, bool splits_batch_norm, OffloadLink link = {}, c10::Device device = c10::kCPU,
              std::filesystem::path folder = {})
      : limits_{budget.count(), splits_batch_norm, std::move(link), device}, folder_(std::move(folder)) {}
  StepPlanner(const StepPlanner&) = delete;  // plans refer to its limits
  StepPlanner& operator=(const StepPlanner&) = delete;

  /// The plan for a step: one made earlier if it will do. Null within a window, if nothing can be tried there. Throws
  /// BudgetExceeded, with the smallest budget that would do, if nothing fits.
  const StepPlan* plan(const StepToPlan& step);

  // On several ranks each calls look(), and then plan() until what they all said is settled, and then keep().
  /// What is known without trying anything.
  RankSplit look(const StepToPlan& step);
  /// What came of plan().
  RankSplit planned(const StepToPlan& step) const;
  /// The choice of all ranks is this one's.
  void keep(const StepToPlan& step, const AgreedSplit& agreed);

  // What happens to the last plan: see plan_life.h.
  /// The first try of a step comes.
  void forget_tries() { before_.reset(); }
  /// The step ran out of memory. False: no other plan is to be had.
  bool step_down(PlanEvent event);
  /// The step was made, as planned or with other operators.
  void settle(PlanEvent event);
  /// It was not, however often it was made again: plans are again what they were before it.
  void give_up();

  /// Plans go to the file, where they are others than there. What cannot be written is said in the plan.
  void save();

  /// A run that is resumed with them makes the same ones.
  std::string choices() const { return choices_.to_text(); }
  void set_choices(StepChoices choices);

  /// How the first step under a plan that was read, and keeps everything, is watched: so operators that have become
  /// others are noticed. Null: it need not be.
  const ActivationPlan* recorded() const {
    return last_ != nullptr && last_->state == PlanState::Read && last_->recorded ? &*last_->recorded : nullptr;
  }

  /// Null: there is none.
  const StepPlan* last() const { return last_ == nullptr ? nullptr : &last_->plan; }

 private:
  struct Known {
    StepTrials trials;
    StepPlan plan = {};
    PlanState state = PlanState::Tried;
    bool is_stale = false;                        // to be chosen again, from what was tried
    int64_t shared_batch = 0;                     // the largest that this choice was remembered for
    std::optional<ActivationPlan> recorded = {};  // see SavedPlan; where there is a file
  };
  // What a step that runs out of memory begins with.
  struct Before {
    Known known;
    StepChoices choices;
    int times_left_free = 0;  // in this step
    bool is_anew = false;     // it was planned anew in this step
  };

  Known plan_anew(const StepToPlan& step);
  void plan_again(Known& known, const StepToPlan& step);
  std::optional<Known> try_with(const StepToPlan& step, bool model_in_file);
  bool is_worth_files(const Known& in_memory, const StepToPlan& step) const;
  Known* find(const StepToPlan& step);
  Known* find_or_read(const StepToPlan& step);
  void read(const StepToPlan& step);
  bool holds(const Known& read, const StepToPlan& step) const;
  void forget(const Known* known);
  bool is_outdated(const Known& known, const StepToPlan& step) const;
  void choose(Known& known, const StepToPlan& step);
  void remember(const Known& known);
  const StepPlan* in_place(const StepToPlan& step);

  PlanLimits limits_;
  std::list<Known> known_;
  StepChoices choices_;
  Known* last_ = nullptr;
  // Once a plan has had something in files, it stays there: it does not go back and forth between batches.
  InFiles stays_ = InFiles::Nothing;
  std::optional<Before> before_;  // while the step is made again
  std::filesystem::path folder_;
  std::optional<PlanFile> file_;  // from the first look at it on
  bool is_news_ = false;          // the file has other plans
  std::string why_not_read_;      // until a plan says it
};

}  // namespace snug::detail
