#pragma once
// StepPlanner: the plans of a Stepper with a budget. step_planner.cpp opens with which plan a step gets.

#include <cstdint>
#include <filesystem>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "snug/core.h"
#include "src/step/plan_life.h"
#include "src/step/step_trials.h"

namespace snug::detail {

class StepPlanner {
 public:
  /// See PlanLimits. `folder`: for the file of plans; empty: no file.
  StepPlanner(Bytes budget, bool splits_batch_norm, OffloadLink link = {}, c10::Device device = c10::kCPU,
              std::filesystem::path folder = {})
      : limits_{.budget = budget.count(),
                .splits_batch_norm = splits_batch_norm,
                .link = std::move(link),
                .device = device},
        folder_(std::move(folder)) {}
  StepPlanner(const StepPlanner&) = delete;  // plans refer to the limits
  StepPlanner& operator=(const StepPlanner&) = delete;

  /// The state is in no plan in the device's memory.
  void keep_state_outside() {
    limits_.state_must_leave = true;
    stays_.state = place_outside(limits_.device);
  }

  /// The plan for a step: an earlier plan if one serves, otherwise a new plan. Null within a window, if nothing can be
  /// tried. Throws BudgetExceeded, with the smallest budget found, if nothing fits.
  const StepPlan* plan(const StepToPlan& step);

  // Each of several ranks calls look(), then plan() until the reports of all ranks are settled, and then keep().
  /// The split as known without any trial.
  RankSplit look(const StepToPlan& step);
  /// The split that plan() has made.
  RankSplit planned(const StepToPlan& step) const;
  /// Takes the choice of all ranks as the choice of this rank.
  void keep(const StepToPlan& step, const AgreedSplit& agreed);

  /// For plans that no longer hold. Choices are kept, as they were before the first try of the step.
  void forget_plans();

  // Events of the last plan: see plan_life.h.
  /// Before the first try of a step.
  void forget_tries() { before_.reset(); }
  /// For a step that ran out of memory. False: no other plan can be made.
  bool step_down(PlanEvent event);
  /// For a step that was made, as planned or with other operators.
  void settle(PlanEvent event);
  /// For a step that was not made in spite of all repetitions: plans are again as before the step.
  void give_up();

  /// Writes plans to the file, if the file has other plans. If the file cannot be written, the plan says so.
  void save();

  /// Choices for a resumed run, so that the run makes the same choices.
  std::string choices() const { return choices_.to_text(); }
  void set_choices(StepChoices choices);

  /// The operators to watch in the step: those of a plan that does not keep everything. In the first step under a plan
  /// that was read and keeps everything, the operators from the file, so that changed operators are noticed. Null: the
  /// step need not be watched.
  const ActivationPlan* watched() const {
    if (last_ == nullptr || (!last_->plan.activations && last_->state != PlanState::Read)) {
      return nullptr;
    }
    const auto& watched = last_->plan.activations ? last_->plan.activations : last_->recorded;
    return watched ? &*watched : nullptr;
  }

  /// Null: no plan.
  const StepPlan* last() const { return last_ == nullptr ? nullptr : &last_->plan; }

 private:
  struct Known {
    StepTrials trials;
    StepPlan plan = {};
    PlanState state = PlanState::Tried;
    bool is_stale = false;                        // to be chosen again, from the same trials
    int64_t shared_batch = 0;                     // the largest batch that this choice was remembered for
    bool may_widen = true;                        // whether bytes that the plan leaves unused go to the window
    std::optional<ActivationPlan> recorded = {};  // see SavedPlan; only with a folder
  };
  // The beginning of a step that runs out of memory.
  struct Before {
    Known known;
    StepChoices choices;
    int times_left_free = 0;                // in the step
    bool gave_spare_back = false;           // the last try ran out of memory with a larger window
    std::optional<int64_t> left_free = {};  // bytes, by the plan that was given up in the step
  };

  Known plan_anew(const StepToPlan& step);
  void plan_again(Known& known, const StepToPlan& step);
  std::optional<Known> try_with(const StepToPlan& step, Place model, std::optional<StepTrials>* refused = nullptr);
  bool is_worth_files(const Known& in_memory, const StepToPlan& step) const;
  Known* find(const StepToPlan& step);
  // A model outside does not come back to memory.
  bool is_for_this_place(const Known& known) const {
    return stays_.model == Place::Memory || known.plan.placement.model != Place::Memory;
  }
  Known* find_alike(const StepToPlan& step);
  static std::optional<double> growth_since(const Known& known, const StepToPlan& step);
  Known* find_or_read(const StepToPlan& step);
  void read(const StepToPlan& step);
  bool holds(const Known& read, const StepToPlan& step) const;
  void forget(const Known* known);
  bool is_outdated(const Known& known, const StepToPlan& step) const;
  int64_t unused(const Known& known, const StepToPlan& step) const;
  void move_parts(const StepToPlan& step);
  void choose(Known& known, const StepToPlan& step);
  void remember(const Known& known);

  PlanLimits limits_;
  std::list<Known> known_;
  StepChoices choices_;
  Known* last_ = nullptr;
  // Tensors that a plan has put into files stay in files, and do not go back and forth between batches.
  Placement stays_;
  std::optional<Before> before_;  // while the step is repeated
  int64_t evicting_steps_ = 0;    // steps with other operators that fitted by evictions
  int64_t next_evicting_step_ = 1;
  std::filesystem::path folder_;
  std::optional<PlanFile> file_;  // from the first look at the file on
  bool is_news_ = false;          // the file has other plans
  std::string why_not_read_;      // until a plan says so
};

}  // namespace snug::detail
