#pragma once
// StepPlanner: chooses the micro-batch of a Stepper with a memory_budget, and what of it is computed again, so that the whole step stays
// within the budget and is as fast as can be. It tries the step itself: micro-batches of the batch, its half, its quarter and so on are profiled
// and search_step takes the best. Where not even the smallest does, and the model has a snug::sliced, its number of slices is raised.
//
// A plan is made when a shape of batch is first seen and kept for all that are no larger, up to a fifth: so batches of many lengths need few
// plans.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/accumulation/micro_batch.h"
#include "snug/core/bytes.h"
#include "snug/train/detail/rank_split.h"
#include "snug/train/step_plan.h"

namespace snug::detail {

/// Steps of one kind save the same tensors, for batches of the same size.
struct StepKind {
  BatchShape shape = {};
  bool is_training = true;  // the model's mode
  uint32_t trained = 0;     // tells which parameters are not frozen

  friend bool operator==(const StepKind&, const StepKind&) = default;
};

/// What a step is, before it is planned.
struct StepToPlan {
  StepKind kind = {};
  int64_t batch = 0;                    // items
  int64_t micro_batch = 0;              // items in each; 0: to be chosen
  int64_t at_most = RankSplit::kWhole;  // items in each: what all ranks have agreed on
  int64_t fixed_bytes = 0;              // alive all the time: everything but gradients and activations
  int64_t state_bytes = 0;              // of those: state that the optimizer may have yet to allocate
  int64_t gradient_bytes = 0;           // of all
  int64_t optimizer_bytes = 0;          // workspace of the optimizer's part
  bool is_within_window = false;        // there are gradients of earlier micro-batches, so nothing can be tried
  /// Forward and loss of the first `items` items, as the step will run them. They are loaded by the first call, until unload().
  std::function<std::function<at::Tensor()>(int64_t items)> forward = {};
  std::function<void()> unload = {};
  /// Makes gradients, of zeros, as they are from the second micro-batch on; or drops them.
  std::function<void(bool)> hold_gradients = {};
  /// After a forward: how much of that state is of parameters that it gives no gradient to, so that it will not come.
  std::function<int64_t()> idle_state_bytes = {};
  /// After the forward: why the batch must not be cut; empty: it may.
  std::function<std::string()> pinned_by = {};
};

class StepPlanner {
 public:
  /// `splits_batch_norm`: whether a batch may be cut though the model normalises by its statistics. `link`: over which plans may offload.
  StepPlanner(Bytes budget, bool splits_batch_norm, OffloadLink link = {})
      : budget_(budget.count()), splits_batch_norm_(splits_batch_norm), link_(std::move(link)) {}

  /// Which micro-batch was chosen for which batch.
  struct Choice {
    StepKind kind;
    int64_t batch;
    int64_t items;
    int64_t slices;
  };

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
  std::string choices() const;
  /// Throws CorruptFile for what choices() did not make.
  static std::vector<Choice> parse_choices(const std::string& text);
  void set_choices(std::vector<Choice> choices);

  /// Null: there is none.
  const StepPlan* last() const { return last_ == nullptr ? nullptr : &last_->plan; }

 private:
  // One micro-batch that was tried.
  struct Tried {
    StepProfile profile;
    int64_t loaded_bytes;  // of its items, where loading copies them
    int64_t slices;        // that snug::sliced cut them into
  };
  // What a step that runs out of memory changes.
  struct BeforeStepDown {
    int64_t left_free;
    int64_t at_most;
    StepPlan plan;
    std::vector<Choice> choices;
  };
  struct Known {
    StepKind kind;
    int64_t batch;
    int64_t fixed_bytes;
    int64_t gradient_bytes;
    int64_t optimizer_bytes;
    int64_t idle_state_bytes = 0;         // that fixed_bytes is without
    std::map<int64_t, Tried> tried = {};  // by items
    std::string pinned_by = {};
    std::string untried = {};  // those that did not run, for people
    bool can_slice = false;    // the model asked how many
    int64_t left_free = 0;     // of the budget, since it ran out of memory
    bool is_stale = false;
    int64_t at_most = RankSplit::kWhole;  // what it was chosen within
    int64_t shared_batch = 0;             // the largest that this choice was remembered for
    StepPlan plan = {};
    std::optional<BeforeStepDown> before = {};  // while the step is made again

    // Idle state that has come since, as another step gave it a gradient, is alive now.
    int64_t fixed_bytes_of(const StepToPlan& step) const {
      return step.fixed_bytes - std::min(idle_state_bytes, step.state_bytes);
    }
    int64_t most_items() const { return std::min(at_most, batch); }
    int64_t micro_batches(int64_t items) const { return (batch + items - 1) / items; }
    // Two at once, where there is a next one.
    int64_t loaded_bytes(int64_t items) const {
      return tried.at(items).loaded_bytes * (micro_batches(items) > 1 ? 2 : 1);
    }
    // Alive beside the activations of one micro-batch.
    int64_t bytes_beside(int64_t items) const {
      return fixed_bytes + loaded_bytes(items) + (micro_batches(items) > 1 ? gradient_bytes : 0);
    }
  };

  Known* find(const StepToPlan& step);
  const Choice* chosen_before(const StepToPlan& step) const;
  void remember(Choice choice);
  bool is_outdated(const Known& known, const StepToPlan& step) const;
  bool try_one(Known& known, const StepToPlan& step, int64_t items, int64_t slices = 1) const;
  int64_t try_all(Known& known, const StepToPlan& step) const;
  int64_t try_at_most(Known& known, const StepToPlan& step, int64_t items) const;
  void try_slices(Known& known, const StepToPlan& step, int64_t items) const;
  StepSearch search(const Known& known, int64_t only) const;
  void choose(Known& known, const StepToPlan& step);
  bool make_plan(Known& known, const StepToPlan& step, const StepSearch& found) const;
  int64_t smallest_budget(Known known, const StepToPlan& step) const;
  [[noreturn]] void refuse(const Known& known, int64_t smallest) const;

  int64_t budget_;
  bool splits_batch_norm_;
  OffloadLink link_;
  std::list<Known> known_;
  std::vector<Choice> choices_;
  Known* last_ = nullptr;
  bool is_refused_ = false;  // there is no plan, so less cannot be asked of it
};

}  // namespace snug::detail
