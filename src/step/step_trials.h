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

#include "snug/planner.h"
#include "snug/step_plan.h"
#include "src/step/plan_file.h"
#include "src/step/rank_verdict.h"
#include "src/step/step_choices.h"
#include "src/step/step_to_plan.h"

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
  StepTrials(StepKind kind, const StepCounts& counts, const PlanLimits& limits, bool model_in_file);

  const StepKind& kind() const { return kind_; }
  /// What plans count with.
  const StepCounts& counts() const { return counts_; }
  /// What is in files while it tries: as much as can be, since trials have most room then.
  InFiles while_trying() const { return model_in_file_ ? InFiles::Everything : InFiles::State; }
  /// Every operator of the micro-batch, all kept as in `choice`.
  ActivationPlan recorded(const StepChoice& choice) const;
  void set_at_most(int64_t items) { counts_.at_most = items; }
  /// After it ran out of memory with as much left free. False: half of the room would be.
  bool leave_more_free();
  /// From here on the state is in a file, whatever is faster.
  void keep_state_in_file() { state_must_be_in_file_ = true; }

  /// Bytes that such a step takes beside what plans so far have counted on.
  int64_t more_than_before(const StepToPlan& step) const {
    return std::max<int64_t>(0, fixed_bytes_of(step) - counts_.fixed_bytes - counts_.kept_bytes);
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
  void run(const StepToPlan& step, const Choice* before) { try_slices(step, try_all(step, before)); }
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
    return step.counts.fixed_bytes - std::min(counts_.idle_state_bytes, step.state_bytes);
  }
  // No smaller micro-batch will do.
  bool is_least(const StepToPlan& step, int64_t items) const {
    return items == 1 || step.micro_batch > 0 || (!pinned_by_.empty() && items == step.counts.batch);
  }
  int64_t most_items() const { return std::min(counts_.at_most, counts_.batch); }
  int64_t micro_batches(int64_t items) const { return (counts_.batch + items - 1) / items; }
  // Two at once, where there is a next one.
  int64_t loaded_bytes(int64_t items) const {
    return tried_.at(items).loaded_bytes * (micro_batches(items) > 1 ? 2 : 1);
  }
  int64_t more_left_free() const {
    return counts_.left_free + std::max<int64_t>({4096, counts_.left_free, bytes_for_activations() / 32});
  }
  int64_t bytes_for_activations() const { return limits_->budget - fixed_bytes(state_in_file_); }
  // Gradients as the step will have them, while it is tried; within a window they are there.
  bool holds_gradients(const StepToPlan& step, int64_t items) const {
    return micro_batches(std::max(items, measured_for_)) > 1 && !model_in_file_ && !step.is_within_window;
  }
  bool state_can_leave() const { return counts_.state_file.moved > 0; }
  // What is idle is counted nowhere.
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
  // Alive beside the activations of one micro-batch.
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
  bool state_in_file_ = false;  // in the last plan
  bool state_must_be_in_file_ = false;
  bool trusts_idle_state_ = true;
  std::map<int64_t, Tried> tried_;  // by items
  std::string pinned_by_;           // why the batch is not cut
  std::string untried_;             // those that did not run, for people
  bool can_slice_ = false;          // the model asked how many
  int64_t measured_for_ = 0;        // items of a micro-batch that cannot run, of which parts are tried; 0: no such
};

}  // namespace snug::detail
