// Which plan a step gets
//
// Trials take several passes, and batches differ from step to step: in length, in items, in frozen parameters, in
// modules in training mode. A plan for each batch would try in nearly every step. One plan for the largest batch would
// waste memory and time on all smaller batches. So a plan serves every step of the same modes and the same trained
// parameters (StepKind) with as many items or fewer, if no side of an item is longer than planned and at most a fifth
// is wasted. A new plan replaces the plans that the new plan covers. A plan that cuts the batch serves more items too;
// a plan that does not cut the batch has no room for the gradients that several micro-batches keep.
//
// Where sizes vary from batch to batch, each new size would make a plan. So once kPlansOfLikeSteps plans exist for
// steps that differ in sizes alone, a step takes the closest plan, larger or smaller, if the step fits when the plan's
// activations grow as the elements of the batch do.
//
// A plan comes from the first of these sources:
//
//   1. an earlier step of this program
//   2. plan_folder, if trials would give the same plan now (holds)
//   3. trials with the model in memory
//   4. trials with the model in files, or of a device on the host, if nothing fits in memory; on a CPU also if
//      recomputation takes more time than gradients take to a file and back; then the faster plan of 3 and 4 wins
//
// Consequences:
// - A step that needs more bytes than the plan has counted, or smaller micro-batches for another rank, makes a plan
//   outdated, not useless: the choice is made again from the trials so far. If nothing fits, new trials are made.
// - State and weights that a plan has put into files or on the host stay there for later plans. Otherwise batches of
//   different sizes would move the state and weights back and forth. On the host the CPU makes the updates from then
//   on, so on a device the bits of later steps can depend on the order of the batches.
// - Weights outside pass through a window in memory. Plans count the smallest window. Bytes that a plan leaves unused
//   make the window larger in its steps. A step that runs out of memory gives them back first.
// - A step that fails is treated by the table in plan_life.h. The plan and the choices from before the first repetition
//   are kept, and return if the step is not made in spite of all repetitions.
// - The micro-batch of each plan is remembered in StepChoices, longer than the plan, and saved with a run. A resumed
//   run makes the same steps, although trials on another day would find other times.

#include "src/step/step_planner.h"

#include <algorithm>
#include <exception>
#include <vector>

#include <fmt/format.h>

#include "snug/state.h"
#include "src/core/first_line.h"
#include "src/core/other_state.h"
#include "src/remat/activation_plan.h"

namespace snug::detail {

StepPlanner::Known* StepPlanner::find(const StepToPlan& step) {
  Known* found = nullptr;
  for (Known& known : known_) {
    const StepChoice& choice = known.plan.choice;
    // A plan with one micro-batch has no room for the gradients that several micro-batches keep.
    const bool large_enough = step.counts.batch <= known.trials.counts().batch || choice.micro_batches > 1;
    const bool same_cut = step.micro_batch == 0 || std::min(step.micro_batch, step.counts.batch) <= choice.items;
    const StepKind& kind = known.trials.kind();
    if (is_for_this_place(known) && large_enough && same_cut && covers(kind, step.kind) &&
        (found == nullptr || kind == step.kind)) {
      found = &known;
    }
  }
  return found != nullptr ? found : find_alike(step);
}

// A plan that was made for other sizes. A plan that keeps everything wastes nothing on a smaller step. Any other plan
// serves once enough plans exist.
StepPlanner::Known* StepPlanner::find_alike(const StepToPlan& step) {
  const auto growth_of = [&](const Known& known) -> std::optional<double> {
    return is_for_this_place(known) && known.state != PlanState::Read ? growth_since(known, step) : std::nullopt;
  };
  const auto serves = [&](const Known& known) { return growth_of(known) && unused(known, step) >= 0; };
  for (Known& known : known_) {
    const bool keeps_everything = !known.plan.activations && known.plan.choice.micro_batches == 1;
    if (keeps_everything && growth_of(known).value_or(2) <= 1 && serves(known)) {
      return &known;
    }
  }
  Known* found = closest(known_, growth_of);
  return found != nullptr && serves(*found) ? found : nullptr;
}

// Bytes of the budget that a step leaves unused, without a larger window. The plan's activations grow as the elements
// of the batch do.
int64_t StepPlanner::unused(const Known& known, const StepToPlan& step) const {
  const double growth = growth_since(known, step).value_or(1);
  const int64_t larger =
      growth <= 1 ? 0 : static_cast<int64_t>((growth - 1) * static_cast<double>(known.plan.choice.plan->peak_bytes));
  return limits_.budget - known.trials.counts().left_free - known.plan.choice.peak_bytes -
         known.trials.more_than_before(step) - larger;
}

std::optional<double> StepPlanner::growth_since(const Known& known, const StepToPlan& step) {
  const StepChoice& choice = known.plan.choice;
  return growth(known.trials.kind(), choice.items, choice.micro_batches > 1, step);
}

const StepPlan* StepPlanner::plan(const StepToPlan& step) {
  last_ = nullptr;  // in case of an exception
  Known* known = find_or_read(step);
  if (known == nullptr && step.is_within_window && step.counts.model_in_file.can_leave()) {
    step.trial.put(stays_);  // the micro-batch may need what a larger window takes
    return nullptr;          // gradients of the window may be in files
  }
  if (known == nullptr) {
    Known made = plan_anew(step);
    known_.remove_if([&](const Known& old) {
      return old.trials.counts().batch <= step.counts.batch && covers(step.kind, old.trials.kind());
    });
    known = &known_.emplace_back(std::move(made));
  } else if (is_outdated(*known, step) && !step.is_within_window) {
    const int64_t more = known->trials.more_than_before(step);
    plan_again(*known, step);
    if (more > 0) {
      known->plan.considered +=
          fmt::format("Planned again: the step takes {} more than when the former plan was made.\n", Bytes(more).str());
    }
  }
  last_ = known;
  why_not_read_.clear();  // the plan says so
  move_parts(step);
  return &known->plan;
}

// To the places of the last plan. Bytes that the plan leaves unused make the window of weights larger, except a little
// room for predictions that fail. The device may have no room in one piece: then the window stays small.
void StepPlanner::move_parts(const StepToPlan& step) {
  StepPlan& plan = last_->plan;
  const int64_t unit = std::max<int64_t>(1, limits_.budget / 64);
  const int64_t spare = last_->may_widen ? std::max<int64_t>(0, unused(*last_, step) / unit - 1) * unit : 0;
  stays_ = {.state = std::max(stays_.state, plan.placement.state),
            .model = std::max(stays_.model, plan.placement.model)};
  try {
    plan.spare_bytes = step.trial.put(stays_, spare);
  } catch (const std::exception& error) {
    if (spare == 0 || !is_out_of_memory(error)) {
      throw;
    }
    last_->may_widen = false;
    plan.spare_bytes = step.trial.put(stays_);
  }
}

// Plans again because the step needs more bytes than before: from the trials so far, or anew if nothing of these fits,
// once in a step.
void StepPlanner::plan_again(Known& known, const StepToPlan& step) {
  const bool may_leave = known.plan.placement.model == Place::Memory && step.counts.model_in_file.can_leave();
  const bool may_be_anew = !before_ || !before_->left_free;
  std::exception_ptr refusal;
  try {
    step.trial.put(known.trials.while_trying());
    known.trials.run_again(step, choices_.find(step), known.plan.choice.items);
    choose(known, step);
    return;
  } catch (const BudgetExceeded&) {
    if (!may_leave && !may_be_anew) {
      throw;
    }
    refusal = std::current_exception();
  }
  try {
    if (before_) {
      before_->left_free = known.trials.counts().left_free;
    }
    known = may_be_anew ? plan_anew(step) : *try_with(step, place_outside(limits_.device));
  } catch (const BudgetExceeded& error) {
    if (error.smallest_feasible().count() == 0) {  // the trials so far may know a budget
      std::rethrow_exception(refusal);
    }
    throw;
  }
}

// The faster plan of two: with the model in memory, and with the model in files. If neither fits, the exception is that
// of the files, unless only the trials in memory know a budget.
StepPlanner::Known StepPlanner::plan_anew(const StepToPlan& step) {
  std::optional<Known> in_memory, outside;
  std::optional<StepTrials> refused;
  if (stays_.model == Place::Memory) {
    in_memory = try_with(step, Place::Memory, &refused);
    if (in_memory && !is_worth_files(*in_memory, step)) {
      return *std::move(in_memory);
    }
  }
  try {
    outside = try_with(step, place_outside(limits_.device));
  } catch (const std::exception& error) {
    const auto* const no_plan = dynamic_cast<const BudgetExceeded*>(&error);
    if (refused && no_plan != nullptr && no_plan->smallest_feasible().count() == 0) {
      refused->refuse_if_known();
    }
    const bool is_no_room = dynamic_cast<const ConfigError*>(&error) == nullptr &&  // on the disk or in the budget
                            dynamic_cast<const DistributedError*>(&error) == nullptr && !is_interrupt(error);
    if (!in_memory || !is_no_room) {
      throw;
    }
  }
  if (!in_memory || (outside && plan::kApart * outside->plan.choice.seconds < in_memory->plan.choice.seconds)) {
    return *std::move(outside);
  }
  remember(*in_memory);
  return *std::move(in_memory);
}

// None: nothing fits, or not even the present tensors fit. Then the caller tries with the model in files.
// `refused`: for the trials of which nothing fits.
std::optional<StepPlanner::Known> StepPlanner::try_with(const StepToPlan& step, Place model,
                                                        std::optional<StepTrials>* refused) {
  Known known{.trials = StepTrials(step, limits_, model)};
  const bool is_last_way = model != Place::Memory || !step.counts.model_in_file.can_leave();
  if (!is_last_way && !known.trials.has_room()) {
    return std::nullopt;
  }
  try {
    step.trial.put(known.trials.while_trying());
  } catch (const std::exception& error) {
    if (is_last_way || !is_out_of_memory(error)) {
      throw;
    }
    return std::nullopt;
  }
  if (stays_.state != Place::Memory) {
    known.trials.keep_state_outside();
  }
  known.trials.run(step, choices_.find(step));
  if (!is_last_way && !known.trials.has_found()) {
    if (refused != nullptr) {
      *refused = std::move(known.trials);
    }
    return std::nullopt;
  }
  if (before_ && before_->left_free) {
    known.trials.leave_free(*before_->left_free);
  }
  choose(known, step);
  return known;
}

// Whether recomputation with the model in memory takes more time than gradients take to a file and back.
bool StepPlanner::is_worth_files(const Known& in_memory, const StepToPlan& step) const {
  const bool is_on_device = place_outside(limits_.device) == Place::Host;  // where the CPU would make the updates
  if (is_on_device || !step.counts.model_in_file.can_leave() || !limits_.link.is_open()) {
    return false;
  }
  const StepChoice& choice = in_memory.plan.choice;
  const double recomputing =
      static_cast<double>(choice.micro_batches) * (choice.plan->seconds - choice.plan->plain_seconds);
  return recomputing >
         limits_.link.out_seconds(step.counts.gradient_bytes) + limits_.link.back_seconds(step.counts.gradient_bytes);
}

void StepPlanner::choose(Known& known, const StepToPlan& step) {
  const int64_t same = known.trials.counts().left_free > 0 ? known.plan.choice.items : 0;
  if (stays_.state != Place::Memory) {
    known.trials.keep_state_outside();
  }
  known.plan = known.trials.choose(step, choices_.find(step), same);
  known.is_stale = false;
  if (!folder_.empty()) {
    known.recorded = known.plan.activations ? std::nullopt : std::optional(known.trials.recorded(known.plan.choice));
    known.plan.considered += why_not_read_;
    is_news_ = true;
  }
  remember(known);
}

void StepPlanner::remember(const Known& known) {
  choices_.remember({known.trials.kind(), known.trials.counts().batch, known.plan.choice.items, known.plan.slices});
}

bool StepPlanner::is_outdated(const Known& known, const StepToPlan& step) const {
  const StepChoice& choice = known.plan.choice;
  const StepTrials& trials = known.trials;
  return known.is_stale ||
         choice.peak_bytes + trials.more_than_before(step) > limits_.budget - trials.counts().left_free ||
         std::min(choice.items, step.counts.batch) > step.counts.at_most;
}

// --- with other ranks

RankSplit StepPlanner::look(const StepToPlan& step) {
  last_ = step.counts.batch > 0 ? find_or_read(step) : nullptr;
  if (last_ != nullptr) {
    RankSplit own = planned(step);
    own.is_planned = !is_outdated(*last_, step);
    return own;
  }
  const auto* const before = step.counts.batch > 0 && step.micro_batch == 0 ? choices_.find(step) : nullptr;
  const bool was_cut = before != nullptr && before->items < before->batch;
  return {.at_most = was_cut ? before->items : RankSplit::kWhole,
          .batch = step.counts.batch,
          .is_planned = step.counts.batch == 0};
}

RankSplit StepPlanner::planned(const StepToPlan& step) const {
  const StepChoice& choice = last_->plan.choice;
  const int64_t chosen = choice.micro_batches > 1 ? choice.items : last_->trials.counts().at_most;
  return {.at_most = step.micro_batch > 0 ? RankSplit::kWhole : chosen, .batch = step.counts.batch, .is_planned = true};
}

// The choice is remembered for the largest share of all ranks, because any rank may be the rank that saves the choice.
void StepPlanner::keep(const StepToPlan& step, const AgreedSplit& agreed) {
  if (last_ == nullptr) {
    return;
  }
  move_parts(step);
  if (step.micro_batch > 0) {
    return;
  }
  Known& known = *last_;
  const int64_t batch = std::max(known.trials.counts().batch, agreed.largest_batch);
  if (known.trials.counts().at_most == agreed.at_most && known.shared_batch >= batch) {
    return;
  }
  known.trials.set_at_most(agreed.at_most);
  known.shared_batch = batch;
  is_news_ = true;
  if (const bool is_whole = agreed.at_most == RankSplit::kWhole; is_whole || agreed.at_most < batch) {
    choices_.remember({known.trials.kind(), batch, is_whole ? batch : agreed.at_most, known.plan.slices});
  }
}

void StepPlanner::set_choices(StepChoices choices) {
  forget_plans();
  choices_ = std::move(choices);
}

void StepPlanner::forget_plans() {
  known_.clear();
  file_.reset();
  last_ = nullptr;
  if (before_) {  // a step that is repeated
    choices_ = std::exchange(before_, std::nullopt)->choices;
  }
}

// --- the file

// A plan that was read and does not hold for the step is forgotten, and the step is planned by trials.
StepPlanner::Known* StepPlanner::find_or_read(const StepToPlan& step) {
  if (!folder_.empty() && !file_) {
    read(step);
  }
  Known* found = find(step);
  for (; found != nullptr && found->state == PlanState::Read && !holds(*found, step); found = find(step)) {
    forget(found);
  }
  if (found != nullptr && found->state == PlanState::Read) {
    remember(*found);
  }
  return found;
}

void StepPlanner::read(const StepToPlan& step) {
  file_.emplace(folder_, step.trial.described());
  try {
    for (SavedPlan& saved : file_->read()) {
      known_.push_back({.trials = StepTrials(std::move(saved.kind), saved.counts, limits_, saved.plan.placement.model),
                        .plan = std::move(saved.plan),
                        .state = PlanState::Read,
                        .recorded = std::move(saved.recorded)});
    }
  } catch (const std::exception& error) {
    why_not_read_ = fmt::format("{} was not used: {}\n", file_->path().filename().string(), first_line(error));
  }
}

// Whether trials would give the same plan now: with the micro-batch of the run that goes on, and with at most a
// sixteenth of the budget to spare.
bool StepPlanner::holds(const Known& read, const StepToPlan& step) const {
  const StepCounts& counts = read.trials.counts();
  const StepPlan& plan = read.plan;
  const OffloadLink* link = plan.activations ? &profile_of(*plan.activations).link : nullptr;
  const auto* const before = step.micro_batch == 0 ? choices_.find(step) : nullptr;
  return !is_outdated(read, step) && plan.budget_bytes == limits_.budget &&
         counts.gradient_bytes == step.counts.gradient_bytes && counts.optimizer_bytes == step.counts.optimizer_bytes &&
         counts.state_in_file == step.counts.state_in_file && counts.model_in_file == step.counts.model_in_file &&
         counts.fixed_bytes - step.counts.fixed_bytes <= limits_.budget / 16 &&
         (link == nullptr || !link->is_open() || link->directory == limits_.link.directory) &&
         (before == nullptr ||
          (std::min(before->items, step.counts.batch) == std::min(plan.choice.items, step.counts.batch) &&
           before->slices == plan.slices));
}

void StepPlanner::save() {
  if (!file_ || !std::exchange(is_news_, false)) {
    return;
  }
  std::vector<SavedPlan> plans;
  for (const Known& known : known_) {
    if (!known.is_stale) {
      plans.push_back({known.trials.kind(), known.trials.counts(), known.plan, known.recorded});
    }
  }
  try {
    file_->write(plans);
  } catch (const std::exception& error) {
    if (last_ != nullptr) {
      last_->plan.considered += fmt::format("The plan was not kept for the next program: {}\n", first_line(error));
    }
  }
}

// --- events of a plan

bool StepPlanner::step_down(PlanEvent event) {
  constexpr int kMostTimesLeftFree = 2;
  if (last_ == nullptr) {
    return false;
  }
  if (!before_) {
    before_.emplace(Before{*last_, choices_});
  }
  if (last_->plan.spare_bytes > 0) {
    last_->plan.spare_bytes = 0;
    last_->may_widen = false;
    before_->gave_spare_back = true;
    return true;
  }
  if (next_of(last_->state, event) == PlanNext::LeaveMoreFree) {
    StepTrials& trials = last_->trials;
    if (trials.count_idle_state() || (before_->times_left_free++ < kMostTimesLeftFree && trials.leave_more_free())) {
      last_->is_stale = true;
      return true;
    }
  }
  if (before_->left_free) {
    return false;
  }
  before_->left_free = last_->trials.counts().left_free;
  forget(std::exchange(last_, nullptr));
  return true;
}

void StepPlanner::settle(PlanEvent event) {
  const auto before = std::exchange(before_, std::nullopt);
  if (last_ == nullptr || last_->is_stale || (before && before->gave_spare_back)) {
    return;
  }
  if (event == PlanEvent::MadeByEviction) {
    const bool is_due = ++evicting_steps_ >= next_evicting_step_;
    next_evicting_step_ *= is_due ? 4 : 1;
    event = is_due ? event : PlanEvent::MadeOtherwise;
  }
  if (next_of(last_->state, event) == PlanNext::PlanAnew) {
    forget(std::exchange(last_, nullptr));
  } else {
    last_->state = PlanState::Proven;
  }
}

void StepPlanner::give_up() {
  if (!before_) {
    return;
  }
  Before before = *std::exchange(before_, std::nullopt);
  known_.remove_if([&](const Known& one) { return one.trials.kind() == before.known.trials.kind(); });
  last_ = &known_.emplace_back(std::move(before.known));
  choices_ = std::move(before.choices);
}

void StepPlanner::forget(const Known* known) {
  const auto removed = known_.remove_if([&](const Known& one) { return &one == known; });
  is_news_ = is_news_ || removed > 0;
}

}  // namespace snug::detail
