#pragma once
// StepTrials: the trials of a step, and the plan that follows from the trials. Micro-batches of the batch, of its half,
// its quarter and so on are profiled, and search_step takes the best. If not even the smallest micro-batch fits, and
// the model has a snug::sliced, the number of slices is raised. step_trials.cpp opens with the whole search.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include "snug/planner.h"
#include "snug/step_plan.h"
#include "src/step/plan_file.h"
#include "src/step/rank_verdict.h"
#include "src/step/step_choices.h"
#include "src/step/step_to_plan.h"

namespace snug::detail {

/// The limits of every plan of a Stepper.
struct PlanLimits {
  int64_t budget = 0;              ///< bytes
  bool splits_batch_norm = false;  ///< whether a batch may be cut though the model normalises by batch statistics
  OffloadLink link = {};           ///< the link over which plans may offload
  c10::Device device = c10::kCPU;  ///< the device of the budget
};

class StepTrials {
 public:
  using Choice = StepChoices::Choice;

  /// Nothing is tried yet. `limits` must outlive the StepTrials. `model_in_file`: weights and gradients are in files.
  StepTrials(const StepToPlan& step, const PlanLimits& limits, bool model_in_file);
  /// For a plan of another program. The other program has made the trials.
  StepTrials(StepKind kind, const StepCounts& counts, const PlanLimits& limits, bool model_in_file);

  const StepKind& kind() const { return kind_; }
  /// The bytes and items that plans count with.
  const StepCounts& counts() const { return counts_; }
  /// What is in files during trials: as much as possible, because trials have most room then.
  InFiles while_trying() const { return model_in_file_ ? InFiles::Everything : InFiles::State; }
  /// Every operator of the micro-batch, all results kept as in `choice`.
  ActivationPlan recorded(const StepChoice& choice) const;
  void set_at_most(int64_t items) { counts_.at_most = items; }
  /// For a step that ran out of memory with the present bytes left free. False: more than half of the room would be
  /// left free.
  bool leave_more_free();
  /// From here on the state is in a file, even if memory is faster.
  void keep_state_in_file() { state_must_be_in_file_ = true; }

  /// Bytes that the step takes beyond the count of earlier plans.
  int64_t more_than_before(const StepToPlan& step) const {
    return std::max<int64_t>(0, fixed_bytes_of(step) - counts_.fixed_bytes - counts_.kept_bytes);
  }
  /// For a step that ran out of memory. State that no trial gave a gradient may have come after all, for branches that
  /// other items reach. From here on the idle state is counted. False: no state was idle.
  bool count_idle_state();
  /// Whether weights, gradients and the needs of an update leave any room within the budget.
  bool has_room() const {
    const bool in_file = state_can_leave();
    return std::max(fixed_bytes(in_file), bytes_of_update(in_file)) <= limits_->budget;
  }
  /// Whether something fits, after run().
  bool has_found() const { return search(0).search.choice.has_value(); }
  /// Tries until something fits, if anything fits. `before`: the choice of an earlier run, tried first, or null.
  void run(const StepToPlan& step, const Choice* before) { try_slices(step, try_all(step, before)); }
  /// Like run(), for a step that has outgrown a plan of micro-batches of `items`.
  void run_again(const StepToPlan& step, const Choice* before, int64_t items);
  /// The fastest plan that fits. After a step ran out of memory, micro-batches of `same` items come first, because the
  /// bits are then the same. Throws BudgetExceeded, with the smallest budget found, if nothing fits.
  StepPlan choose(const StepToPlan& step, const Choice* before, int64_t same);

 private:
  // The result of a search, with the optimizer's state in memory or in a file.
  struct Found {
    StepSearch search;
    bool state_in_file = false;
    std::optional<StepSearch> elsewhere = {};  // with the state in the other place, if the state has a choice
  };

  // Searches for a micro-batch. Answers for a budget are remembered, and plans for all budgets.
  struct Searches {
    explicit Searches(const StepProfile& profile) : simulator(profile), solver(simulator) {}
    const plan::StepSimulator simulator;
    plan::PlanSolver solver;
  };

  // A micro-batch that was tried.
  struct Tried {
    StepProfile profile;
    int64_t loaded_bytes;                             // of the items, if loading copies the items
    int64_t slices;                                   // of snug::sliced
    mutable std::shared_ptr<Searches> searches = {};  // while a plan is searched, because plans take memory

    Searches& search() const {
      searches = searches ? searches : std::make_shared<Searches>(profile);
      return *searches;
    }
  };

  bool try_one(const StepToPlan& step, int64_t items, int64_t slices = 1);
  void profile(const StepToPlan& step, int64_t items, int64_t slices);
  int64_t try_all(const StepToPlan& step, const Choice* before);
  int64_t try_at_most(const StepToPlan& step, const Choice* before, int64_t items);
  int64_t try_whole(const StepToPlan& step);
  void try_slices(const StepToPlan& step, int64_t items);
  bool fits_plainly(int64_t items) const;
  Found search(int64_t only) const;
  StepSearch search_with(int64_t only, bool state_in_file) const;
  std::optional<StepPlan> make_plan(const StepToPlan& step, const Found& found);
  std::string told_of_state(const Found& found) const;
  int64_t smallest_budget(const StepToPlan& step) const;
  [[noreturn]] void refuse(int64_t smallest, int64_t bound) const;

  // State that was idle, and has come because another step gave it a gradient, is alive now.
  int64_t fixed_bytes_of(const StepToPlan& step) const {
    return step.counts.fixed_bytes - std::min(counts_.idle_state_bytes, step.state_bytes);
  }
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
  int64_t bytes_for_activations() const { return limits_->budget - fixed_bytes(state_in_file_); }
  // Whether a trial holds gradients, as the step will. Within a window the gradients exist already.
  bool holds_gradients(const StepToPlan& step, int64_t items) const {
    return micro_batches(std::max(items, measured_for_)) > 1 && !model_in_file_ && !step.is_within_window;
  }
  bool state_can_leave() const { return counts_.state_file.moved > 0; }
  // Idle state is counted in neither place.
  int64_t fixed_bytes(bool state_in_file) const {
    return counts_.fixed_bytes + counts_.effect_bytes -
           (state_in_file ? std::max<int64_t>(0, counts_.state_file.moved - counts_.idle_state_bytes) : 0) -
           (model_in_file_ ? counts_.model_file.moved - counts_.model_file.beside : 0);
  }
  int64_t gradient_bytes() const { return model_in_file_ ? 0 : counts_.gradient_bytes; }
  int64_t workspace_bytes(bool state_in_file) const {
    return state_in_file ? counts_.state_file.workspace : counts_.optimizer_bytes;
  }
  double state_seconds(bool state_in_file) const {
    return state_in_file ? limits_->link.out_seconds(counts_.state_file.moved) +
                               limits_->link.back_seconds(counts_.state_file.moved)
                         : 0;
  }
  // Bytes alive beside the activations of one micro-batch.
  int64_t bytes_beside(int64_t items, bool state_in_file) const {
    return fixed_bytes(state_in_file) + loaded_bytes(items) + (micro_batches(items) > 1 ? gradient_bytes() : 0);
  }
  int64_t bytes_of_update(bool state_in_file) const {
    return fixed_bytes(state_in_file) + gradient_bytes() + workspace_bytes(state_in_file);
  }

  const PlanLimits* limits_;
  StepKind kind_;
  StepCounts counts_;
  bool model_in_file_;
  bool state_in_file_ = false;  // of the last plan
  bool state_must_be_in_file_ = false;
  bool trusts_idle_state_ = true;
  std::map<int64_t, Tried> tried_;  // by items
  std::string pinned_by_;           // why the batch is not cut
  std::string untried_;             // the micro-batches that did not run, for people
  bool can_slice_ = false;          // the model asked for the number of slices
  int64_t measured_for_ = 0;        // items of a micro-batch that cannot run, while its parts are tried; otherwise 0
};

}  // namespace snug::detail
