#pragma once
// StepTrials: the trials of a step, and the plan that follows from the trials. step_trials.cpp opens with the search.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include "snug/step_plan.h"
#include "src/step/saved_plans.h"

namespace snug::detail {

/// The limits of every plan of a Stepper.
struct PlanLimits {
  int64_t budget = 0;              ///< bytes
  bool splits_batch_norm = false;  ///< whether a batch may be cut though the model normalises by batch statistics
  OffloadLink link = {};           ///< the link over which plans may offload
  c10::Device device = c10::kCPU;  ///< the device of the budget
  bool state_must_leave = false;   ///< whether the optimizer cannot update its state in the device's memory
};

class StepTrials {
 public:
  using Choice = StepChoices::Choice;

  /// Nothing is tried yet. `limits` must outlive the StepTrials. `model`: the place of weights and gradients.
  StepTrials(const StepToPlan& step, const PlanLimits& limits, Place model);
  /// For a plan of another program. The other program has made the trials.
  StepTrials(StepKind kind, const StepCounts& counts, const PlanLimits& limits, Place model);

  const StepKind& kind() const { return kind_; }
  /// The bytes and items that plans count with.
  const StepCounts& counts() const { return counts_; }
  /// The placement during trials: the state is outside if possible, because trials have most room then.
  Placement while_trying() const { return with_state(outside()); }
  /// Every operator of the micro-batch, all results kept as in `choice`.
  ActivationPlan recorded(const StepChoice& choice) const;
  void set_at_most(int64_t items) { counts_.at_most = items; }
  /// For a step that ran out of memory with the present bytes left free. False: more than half of the room would be
  /// left free.
  bool leave_more_free();
  /// Plans leave more than `bytes` bytes free, or `bytes`, or as many as before, so that something fits.
  void leave_free(int64_t bytes);
  /// From here on the state is outside, even if memory is faster.
  void keep_state_outside() { state_must_be_outside_ = true; }

  /// Bytes that the step takes beyond the count of earlier plans.
  int64_t more_than_before(const StepToPlan& step) const {
    // State that was idle, and has come because another step gave it a gradient, is alive now.
    const int64_t state_that_came = std::min(counts_.idle_state_bytes, step.state_bytes);
    return std::max<int64_t>(0, step.counts.fixed_bytes - state_that_came - counts_.fixed_bytes - counts_.kept_bytes);
  }
  /// For a step that ran out of memory. State that no trial gave a gradient may have come after all, for branches that
  /// other items reach. From here on the idle state is counted. False: no state was idle.
  bool count_idle_state();
  /// Whether weights, gradients and the needs of an update leave any room within the budget.
  bool has_room() const { return counts_.memory(with_state(farthest_state())).in_update() <= limits_->budget; }
  /// Whether something fits, after run().
  bool has_found() const { return search(0).search.choice.has_value(); }
  /// Tries until something fits, if anything fits. `before`: the choice of an earlier run, tried first, or null.
  void run(const StepToPlan& step, const Choice* before) { try_slices(step, try_all(step, before)); }
  /// Like run(), for a step that has outgrown a plan of micro-batches of `items`.
  void run_again(const StepToPlan& step, const Choice* before, int64_t items);
  /// The fastest plan that fits. After a step ran out of memory, micro-batches of `same` items come first, because the
  /// bits are then the same. Throws BudgetExceeded, with the smallest budget found, if nothing fits.
  StepPlan choose(const StepToPlan& step, const Choice* before, int64_t same);
  /// For trials of which nothing fits: throws BudgetExceeded if they know the smallest budget that would do.
  void refuse_if_known() const;

 private:
  // The result of a search under a placement.
  struct Found {
    plan::Search search;
    Placement placement;
    std::optional<plan::Search> elsewhere = {};  // with the state in the other place, if the state has a choice
  };

  // Searches for a micro-batch. Answers for a budget are remembered, and plans for all budgets.
  struct Searches {
    Searches(const plan::Profile& profile, plan::SolverOptions options)
        : simulator(profile), solver(simulator, options) {}
    const plan::Simulator simulator;
    plan::Solver solver;
  };

  // A micro-batch that was tried, or predicted from micro-batches that were tried.
  struct Tried {
    plan::Profile profile;
    int64_t loaded_bytes = 0;  // of the items, if loading copies the items
    int64_t slices = 1;        // of snug::sliced
    bool is_predicted = false;
    std::optional<plan::Stays> verified = {};         // a plan under which the micro-batch has run as predicted
    mutable std::shared_ptr<Searches> searches = {};  // while a plan is searched, because plans take memory

    Searches& search() const {
      // A prediction is compared with other predictions. The search of the best goes on, with more work.
      const plan::SolverOptions options = is_predicted ? plan::SolverOptions{.work = 300'000} : plan::SolverOptions();
      searches = searches ? searches : std::make_shared<Searches>(profile, options);
      return *searches;
    }
  };

  // How a micro-batch is tried.
  struct Way {
    int64_t slices = 1;
    bool is_last_resort = false;
    const ActivationPlan* plan = nullptr;  // null: runs are plain
    bool only_so = false;                  // if a run does not fit, nothing else is tried, and people are not told
    size_t runs = 2;
  };

  bool try_one(const StepToPlan& step, int64_t items, const Way& way);
  void profile(const StepToPlan& step, int64_t items, const Way& way);
  bool may_fit_plainly(int64_t items) const;
  bool fits_or_is_predicted(const StepToPlan& step, int64_t most);
  bool fits_plainly(const StepToPlan& step, int64_t items);
  std::optional<Tried> predicted(int64_t small, int64_t large, int64_t items) const;
  bool try_both(const StepToPlan& step, int64_t large, size_t runs);
  bool predict(int64_t items, const StepTrials& from, int64_t large);
  int64_t predict_whole(const StepToPlan& step, int64_t most, StepTrials& parts);
  bool predict_halves(const StepToPlan& step, int64_t most, StepTrials& parts, int64_t large);
  bool is_hopeless(int64_t items) const;
  bool is_enough(int64_t items) const;
  bool run_the_best(const StepToPlan& step);
  void run_predicted(const StepToPlan& step, int64_t items);
  int64_t try_all(const StepToPlan& step, const Choice* before);
  int64_t try_each(const StepToPlan& step);
  int64_t try_at_most(const StepToPlan& step, const Choice* before, int64_t items);
  int64_t try_whole(const StepToPlan& step, bool was_tried);
  void try_slices(const StepToPlan& step, int64_t items);
  Found search(int64_t only) const;
  plan::Search search_with(int64_t only, Placement placement) const;
  std::optional<StepPlan> make_plan(const StepToPlan& step, const Found& found);
  std::string told_of_state(const Found& found) const;
  plan::Search smallest_budget(const StepToPlan& step) const;
  plan::Search smallest_budget_of(int64_t items, Tried predicted);
  [[noreturn]] void refuse(const plan::Search& found, bool has_failed) const;

  // Whether so many items, or fewer, ran out of memory without a plan.
  bool does_not_fit(int64_t items) const { return least_too_many_ > 0 && items >= least_too_many_; }
  // Whether no smaller micro-batch can be tried.
  bool is_least(const StepToPlan& step, int64_t items) const {
    return items == 1 || step.micro_batch > 0 || (!pinned_by_.empty() && items == step.counts.batch);
  }
  int64_t most_items() const { return std::min(counts_.at_most, counts_.batch); }
  int64_t micro_batches(int64_t items) const { return (counts_.batch + items - 1) / items; }
  // Two micro-batches are loaded at once, if the step has several.
  int64_t loaded_bytes(int64_t items) const {
    return tried_.at(items).loaded_bytes * (micro_batches(items) > 1 ? 2 : 1);
  }
  int64_t more_left_free() const {
    return counts_.left_free + std::max<int64_t>({4096, counts_.left_free, bytes_for_activations() / 32});
  }
  int64_t bytes_for_activations() const { return limits_->budget - counts_.memory(placement_).fixed; }
  // Whether a trial holds gradients, as the step will. Within a window the gradients exist already.
  bool holds_gradients(const StepToPlan& step, int64_t items) const {
    return micro_batches(std::max(items, measured_for_)) > 1 && placement_.model == Place::Memory &&
           !step.is_within_window;
  }
  // The bytes for the activations of a micro-batch.
  int64_t room(int64_t items) const { return limits_->budget - counts_.left_free - bytes_beside(items, placement_); }
  Placement with_state(Place state) const { return {.state = state, .model = placement_.model}; }
  Place outside() const { return place_outside(limits_->device); }
  Place nearest_state() const { return state_must_be_outside_ ? farthest_state() : Place::Memory; }
  Place farthest_state() const { return counts_.state_in_file.can_leave() ? outside() : Place::Memory; }
  double state_seconds(Placement placement) const;
  // Bytes alive beside the activations of one micro-batch.
  int64_t bytes_beside(int64_t items, Placement placement) const {
    const StepMemory memory = counts_.memory(placement);
    return memory.fixed + loaded_bytes(items) + (micro_batches(items) > 1 ? memory.gradients : 0);
  }

  const PlanLimits* limits_;
  StepKind kind_;
  StepCounts counts_;
  Placement placement_;  // of the last plan
  bool state_must_be_outside_ = false;
  bool trusts_idle_state_ = true;
  std::map<int64_t, Tried> tried_;      // by items
  std::string pinned_by_;               // why the batch is not cut
  std::string untried_;                 // the micro-batches that did not run, for people
  std::string predictions_;             // the micro-batches that were only predicted, for people
  std::optional<Tried> hopeless_ = {};  // the batch, which is not cut, if its prediction shows that no plan fits
  bool can_slice_ = false;              // the model asked for the number of slices
  int64_t least_too_many_ = 0;          // the fewest items that ran out of memory without a plan; 0: none
  int64_t measured_for_ = 0;  // items of a micro-batch that cannot run, while its parts are tried; otherwise 0
};

}  // namespace snug::detail
