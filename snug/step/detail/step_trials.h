#pragma once
// StepTrials: the trials of a step, and the plan that follows. Micro-batches of the batch, its half, its quarter and so
// on are profiled, and search_step takes the best. Where not even the smallest fits, and the model has a snug::sliced,
// its number of slices is raised.

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include "snug/planner/step_search.h"
#include "snug/step/detail/plan_file.h"
#include "snug/step/detail/rank_split.h"
#include "snug/step/detail/step_choices.h"
#include "snug/step/detail/step_to_plan.h"
#include "snug/step/step_plan.h"

namespace snug::detail {

/// What every plan of a Stepper has to keep to.
struct PlanLimits {
  int64_t budget = 0;              ///< bytes
  bool splits_batch_norm = false;  ///< whether a batch may be cut though the model normalises by its statistics
  OffloadLink link = {};           ///< over which plans may offload
  c10::Device device = c10::kCPU;  ///< whose memory the budget is of
};

class StepTrials {
 public:
  using Choice = StepChoices::Choice;

  /// Nothing is tried yet. `limits` must outlive it. `model_in_file`: weights and gradients are in files.
  StepTrials(const StepToPlan& step, const PlanLimits& limits, bool model_in_file);
  /// For a plan of another program, which tried.
  StepTrials(StepKind kind, const PlannedFor& planned_for, const PlanLimits& limits, bool model_in_file);

  const StepKind& kind() const { return kind_; }
  int64_t batch() const { return batch_; }  ///< items
  int64_t at_most() const { return at_most_; }
  PlannedFor planned_for() const;
  /// What is in files while it tries: as much as can be, since trials have most room then.
  InFiles while_trying() const { return model_in_file_ ? InFiles::Everything : InFiles::State; }
  /// Every operator of the micro-batch, all kept as in `choice`.
  ActivationPlan recorded(const StepChoice& choice) const;
  void set_at_most(int64_t items) { at_most_ = items; }
  /// Bytes of the budget that plans leave free: since a step ran out of memory, or a plan when it was tried.
  int64_t left_free() const { return left_free_; }
  /// After it ran out of memory with left_free(). False: half of the room would be.
  bool leave_more_free();
  /// From here on the state is in a file, whatever is faster.
  void keep_state_in_file() { must_be_in_file_ = true; }

  /// Bytes that such a step takes beside what plans so far have counted on.
  int64_t more_than_before(const StepToPlan& step) const {
    return std::max<int64_t>(0, fixed_bytes_of(step) - fixed_bytes_ - kept_bytes_);
  }
  /// A step ran out of memory: state that no trial gave a gradient may have come after all, for branches that other
  /// items reach. It is counted from here on. False: there was none.
  bool count_idle_state();
  /// Whether weights, gradients and what an update takes leave the budget any room.
  bool has_room() const {
    const bool in_file = state_can_leave();
    return std::max(fixed_bytes(in_file), bytes_of_update(in_file)) <= limits_->budget;
  }
  /// After run(): whether something fits.
  bool has_found() const { return search(0).search.choice.has_value(); }
  /// Tries until something fits, if anything does. `before`: the choice of an earlier run, tried first, or null.
  void run(const StepToPlan& step, const Choice* before);
  /// The same for a step that has outgrown a plan of micro-batches of `items`.
  void run_again(const StepToPlan& step, const Choice* before, int64_t items);
  /// The fastest plan that fits; micro-batches of `same` items come first after a step ran out of memory, because then
  /// the bits are the same. Throws BudgetExceeded, with the smallest budget that would do, if none fits.
  StepPlan choose(const StepToPlan& step, const Choice* before, int64_t same);

 private:
  // What a search has found, with the optimizer's state in memory or in a file.
  struct Found {
    StepSearch search;
    bool state_in_file = false;
    std::optional<StepSearch> elsewhere = {};  // with the state in the other place, where there is a choice
  };

  // One micro-batch that was tried.
  struct Tried {
    StepProfile profile;
    int64_t loaded_bytes;  // of its items, where loading copies them
    int64_t slices;        // that snug::sliced cut them into
  };

  bool try_one(const StepToPlan& step, int64_t items, int64_t slices = 1);
  void profile(const StepToPlan& step, int64_t items, int64_t slices);
  int64_t try_all(const StepToPlan& step, const Choice* before);
  int64_t try_at_most(const StepToPlan& step, const Choice* before, int64_t items);
  int64_t try_whole(const StepToPlan& step);
  void try_slices(const StepToPlan& step, int64_t items);
  Found search(int64_t only) const;
  StepSearch search_with(int64_t only, bool state_in_file) const;
  std::optional<StepPlan> make_plan(const StepToPlan& step, const Found& found);
  std::string told_of_state(const Found& found) const;
  int64_t smallest_budget(const StepToPlan& step) const;
  [[noreturn]] void refuse(int64_t smallest, int64_t bound) const;

  // Idle state that has come since, as another step gave it a gradient, is alive now.
  int64_t fixed_bytes_of(const StepToPlan& step) const {
    return step.fixed_bytes - std::min(idle_state_bytes_, step.state_bytes);
  }
  // No smaller micro-batch will do.
  bool is_least(const StepToPlan& step, int64_t items) const {
    return items == 1 || step.micro_batch > 0 || (!pinned_by_.empty() && items == step.batch);
  }
  int64_t most_items() const { return std::min(at_most_, batch_); }
  int64_t micro_batches(int64_t items) const { return (batch_ + items - 1) / items; }
  // Two at once, where there is a next one.
  int64_t loaded_bytes(int64_t items) const {
    return tried_.at(items).loaded_bytes * (micro_batches(items) > 1 ? 2 : 1);
  }
  int64_t more_left_free() const {
    return left_free_ + std::max<int64_t>({4096, left_free_, bytes_for_activations() / 32});
  }
  int64_t bytes_for_activations() const { return limits_->budget - fixed_bytes(state_in_file_); }
  // Gradients as the step will have them, while it is tried; within a window they are there.
  bool holds_gradients(const StepToPlan& step, int64_t items) const {
    return micro_batches(std::max(items, measured_for_)) > 1 && !model_in_file_ && !step.is_within_window;
  }
  bool state_can_leave() const { return state_file_.moved > 0; }
  // What is idle is counted nowhere.
  int64_t fixed_bytes(bool state_in_file) const {
    return fixed_bytes_ + effect_bytes_ -
           (state_in_file ? std::max<int64_t>(0, state_file_.moved - idle_state_bytes_) : 0) -
           (model_in_file_ ? model_file_.moved - model_file_.beside : 0);
  }
  int64_t gradient_bytes() const { return model_in_file_ ? 0 : gradient_bytes_; }
  int64_t workspace_bytes(bool state_in_file) const { return state_in_file ? state_file_.workspace : optimizer_bytes_; }
  double state_seconds(bool state_in_file) const {
    return state_in_file ? limits_->link.out_seconds(state_file_.moved) + limits_->link.back_seconds(state_file_.moved)
                         : 0;
  }
  // Alive beside the activations of one micro-batch.
  int64_t bytes_beside(int64_t items, bool state_in_file) const {
    return fixed_bytes(state_in_file) + loaded_bytes(items) + (micro_batches(items) > 1 ? gradient_bytes() : 0);
  }
  int64_t bytes_of_update(bool state_in_file) const {
    return fixed_bytes(state_in_file) + gradient_bytes() + workspace_bytes(state_in_file);
  }

  const PlanLimits* limits_;
  StepKind kind_;
  int64_t batch_;
  int64_t fixed_bytes_;
  int64_t effect_bytes_ = 0;  // of copies of what the step writes outside of itself
  int64_t kept_bytes_ = 0;    // the most that a step finds of results that the program has kept; in the profiles
  int64_t gradient_bytes_;
  int64_t optimizer_bytes_;
  StateFileBytes state_file_;
  ModelFileBytes model_file_;
  bool model_in_file_;
  bool state_in_file_ = false;  // in the last plan
  bool must_be_in_file_ = false;
  int64_t idle_state_bytes_ = 0;  // that fixed_bytes_ is without
  bool trusts_idle_state_ = true;
  int64_t at_most_;  // items of a micro-batch, for other ranks' sake
  int64_t left_free_;
  std::map<int64_t, Tried> tried_;  // by items
  std::string pinned_by_;           // why the batch is not cut
  std::string untried_;             // those that did not run, for people
  bool can_slice_ = false;          // the model asked how many
  int64_t measured_for_ = 0;        // items of a micro-batch that cannot run, of which parts are tried; 0: no such
};

}  // namespace snug::detail
