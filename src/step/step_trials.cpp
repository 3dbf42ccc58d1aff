// How a Stepper finds a plan
//
// The memory of a step has a part that does not depend on the micro-batch (weights, optimizer state, and gradients if
// the step has several micro-batches) and a part that does (activations and loaded items). Five means trade time for
// memory:
//
//   split      fewer activations at once; gradients are kept between micro-batches
//   recompute  fewer activations; some operators run again in backward
//   offload    activations go to a file or to host memory, and come back
//   files      optimizer state, or state, weights and gradients, in files; an update streams the state
//   host       optimizer state of a device, or state, weights and gradients, in the host's memory; an update streams
//              gradients and weights
//   slices     fewer activations inside snug::sliced; gradients differ by rounding, so slices are the last means
//
// Recompute and offload need a choice for every tensor, and planner/solver has a solver for the choice. Split, files
// and slices have few settings. So the search is a loop around the solver:
//
//   1. Profile the whole batch without any plan. If the batch fits, nothing else is done.
//   2. Profile two small micro-batches (profile_step): an eighth and a sixteenth of the batch, at least 4 and 2 items,
//      or 2 items and 1 item of a batch below 16. A line through both profiles predicts the profile of the batch, of
//      its half, and so on (planner/extrapolate). The parts are run once more, with gradients beside them as a step in
//      micro-batches has, unless the plan of the whole batch is nearly as fast as no plan.
//   3. For each profile, solve for the fastest plan within budget - fixed bytes - gradients - loaded items
//      (plan::search), with the optimizer's state in memory and with the state outside; with the state on the host only
//      if nothing fits with the state in memory. StepPlanner decides about weights and gradients.
//   4. Take the fastest step of all. If its micro-batch is only predicted, run the micro-batch once under its plan. The
//      run gives the micro-batch a profile of its own. Go back to 3 with the profile.
//   5. A plan needs a proof: a run with the bits of plain training and with no more bytes than its profile predicts.
//      Usually the run of 4 is the proof. Otherwise the plan runs once more (plan_activations). If the plan fails, go
//      back to 4 without the micro-batch; if memory runs out, go back to 4 with more memory left free.
//   6. If nothing fits, and the model leaves the number of slices to the plan, profile with more slices.
//
// A prediction is wrong if bytes do not lie on a line, as with all pairs of items, or if many items have other
// operators. A wrong prediction costs a run, and never makes a wrong plan, because a run proves each plan. Small
// micro-batches with different operators predict nothing. Then, and if no predicted plan runs, the batch, its half and
// so on have profiles of their own (try_each). A batch that is not cut, and that no plan fits by the prediction, does
// not run at all: the prediction names the smallest budget. Batches below 8 items, carried state and slices are not
// predicted.
//
// An earlier run's choice is profiled first, and ends the search if the choice fits. Candidates end with the first
// micro-batch whose plan takes at most plan::kApart times as long as no plan, because a smaller one does the same work
// in more operators, or with the sixth if one of the six fits. A batch stays whole if the model normalises by batch
// statistics, if the loss is a Loss::whole, or if the caller carries state from step to step.
//
// Nothing runs beyond the budget, not even to refuse the budget. The refusal names the smallest budget for which a plan
// was found. If nothing ran, parts of the batch are profiled, and the profile of the smallest step is extrapolated.

#include "src/step/step_trials.h"

#include <string_view>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/state.h"
#include "src/core/first_line.h"
#include "src/core/other_state.h"
#include "src/memory/device_memory.h"
#include "src/planner/bound.h"
#include "src/planner/extrapolate.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "src/remat/same_losses.h"
#include "src/remat/slice_scope.h"

namespace snug::detail {
namespace {

// Slices are tried coarsely: each try is a step that may run out of memory, and more slices than needed cost little.
constexpr int64_t kMoreSlices = 4;
constexpr int64_t kCandidates = 6;  // the batch, its half, ... its 32nd part; smaller parts only if none of these fits
constexpr int64_t kLeastToPredict = 8;       // items; fewer items cost as much as their predictions save
constexpr int64_t kLeastToPredictWell = 16;  // items that have parts of several items, and parts of these
constexpr int64_t kLessAfterFailure = 16;    // a plan that failed is followed by a plan in 15 of 16 parts of the bytes

// Statistics of a batch differ from the statistics of its parts. An operator that writes to memory from before the step
// keeps running statistics.
std::string normalises_by_batch(const plan::Profile& profile) {
  for (const plan::Operator& op : profile.operators) {
    if (op.reads_batch_statistics) {
      return op.name;
    }
    for (const plan::Value& value : op.writes) {
      if (profile.storages[static_cast<size_t>(value.storage)].kind == plan::StorageKind::External) {
        return op.name + ", which writes a buffer";
      }
    }
  }
  return {};
}

PlacedBytes bytes_of_activations(const plan::Simulator& simulator, const plan::Solution& plan) {
  const auto& storages = simulator.profile().storages;
  PlacedBytes placed;
  for (const int storage : simulator.at_peak(plan.stays).storages) {
    placed.in_memory += storages[static_cast<size_t>(storage)].bytes;
  }
  for (const int storage : simulator.run(plan.stays).offloaded) {
    placed.outside += storages[static_cast<size_t>(storage)].bytes;
  }
  return placed;
}

bool is_plain(const plan::Solution& plan) {
  return plan.seconds <= plan.plain_seconds && plan.peak_bytes >= plan.plain_peak_bytes;
}

// The plan as a plan for the profile of a run under the plan, if the run, with a peak of so many bytes, proves the
// plan.
std::optional<plan::Stays> proven(const plan::Profile& profile, const ActivationPlan& plan, int64_t peak_bytes) {
  const std::optional<std::vector<int>> places = plan::same_places(profile_of(plan), profile);
  if (!places) {
    return std::nullopt;
  }
  const auto in_run = [&](std::vector<int> events) {
    for (int& event : events) {
      event = event < 0 ? event : places->at(static_cast<size_t>(event));
    }
    return events;
  };
  plan::Stays stays = solution_of(plan).stays;
  for (plan::Stay& stay : stays) {
    stay.event = stay.event == 0 ? 0 : places->at(static_cast<size_t>(stay.event));
  }
  const plan::Simulation own = plan::Simulator(profile).run(stays);
  const plan::Simulation was = PlanContent::of(plan).simulator().run(solution_of(plan).stays);
  const bool is_proven = peak_bytes <= own.peak_bytes && own.written_by == in_run(was.written_by) &&
                         own.fetched_at == in_run(was.fetched_at);
  return is_proven ? std::optional(std::move(stays)) : std::nullopt;
}

// Until the end of the returned scope a trial holds gradients, as the step will.
auto gradients_held(TrialRunner& trial, bool held) {
  auto drop = c10::make_scope_exit([&trial, held] {
    if (held) {
      trial.hold_gradients(false);
    }
  });
  if (held) {
    trial.hold_gradients(true);
  }
  return drop;
}

}  // namespace

StepTrials::StepTrials(StepKind kind, const StepCounts& counts, const PlanLimits& limits, Place model)
    : limits_(&limits),
      kind_(std::move(kind)),
      counts_(counts),
      placement_{.model = model},
      state_must_be_outside_(model != Place::Memory) {}

StepTrials::StepTrials(const StepToPlan& step, const PlanLimits& limits, Place model)
    : StepTrials(step.kind, step.counts, limits, model) {
  counts_.left_free = device_memory(limits.device.type()).gaps();
}

ActivationPlan StepTrials::recorded(const StepChoice& choice) const {
  return PlanContent::make_plan(plan::Simulator(tried_.at(choice.items).profile), *choice.plan);
}

void StepTrials::run_again(const StepToPlan& step, const Choice* before, int64_t items) {
  counts_.fixed_bytes += more_than_before(step);
  counts_.idle_state_bytes = std::min(counts_.idle_state_bytes, step.state_bytes);
  counts_.at_most = step.counts.at_most;
  try_slices(step, counts_.at_most != RankSplit::kWhole ? try_at_most(step, before, most_items()) : items);
}

bool StepTrials::leave_more_free() {
  const int64_t more = more_left_free();
  if (more > bytes_for_activations() / 2) {
    return false;
  }
  counts_.left_free = more;
  return true;
}

void StepTrials::leave_free(int64_t bytes) {
  const int64_t before = std::exchange(counts_.left_free, std::max(counts_.left_free, bytes));
  for (const int64_t left_free : {more_left_free(), counts_.left_free, before}) {
    counts_.left_free = left_free;
    if (has_found()) {
      return;
    }
  }
}

bool StepTrials::count_idle_state() {
  trusts_idle_state_ = false;
  counts_.fixed_bytes += counts_.idle_state_bytes;
  return std::exchange(counts_.idle_state_bytes, 0) > 0;
}

// --- trying

void StepTrials::profile(const StepToPlan& step, int64_t items, const Way& way) {
  TrialRunner& trial = step.trial;
  int64_t kept = 0;
  trial.unload();
  {
    const auto gradients = gradients_held(trial, holds_gradients(step, items));
    const DeviceMemory& memory = device_memory(limits_->device.type());
    const int64_t before = memory.live(limits_->device);
    trial.load(items, /*to_measure=*/measured_for_ > 0);
    const int64_t loaded = memory.live(limits_->device) - before;
    SameLosses losses("Stepper", ", or set plan = false");
    const auto forward = losses.of([&] { return trial.loss(); });
    ProfiledStep found =
        profile_step(forward,
                     {.link = limits_->link,
                      .plan = way.plan,
                      .may_fit_plainly = way.only_so || way.slices > 1 || may_fit_plainly(items),
                      .only_so = way.only_so,
                      .runs = way.runs},
                     trial.journal(), {.counts_kept = true, .persists = way.is_last_resort || is_least(step, items)});
    Tried tried{.profile = std::move(found.profile), .loaded_bytes = loaded, .slices = way.slices};
    if (found.follows_plan) {
      tried.verified = proven(tried.profile, *way.plan, found.peak_bytes);
    }
    tried_.insert_or_assign(items, std::move(tried));
    trial.unload();
    kept = found.kept_bytes;
  }
  counts_.kept_bytes = std::max(counts_.kept_bytes, kept);
  counts_.idle_state_bytes = trusts_idle_state_ ? trial.idle_state_bytes() : 0;
  counts_.effect_bytes = std::max(counts_.effect_bytes, trial.journal().bytes_to_come());
  counts_.fixed_bytes = trial.fixed_bytes() - kept - counts_.idle_state_bytes;
}

// Whether loaded items may run plainly. A part of a micro-batch takes at least the part's share of the bytes.
bool StepTrials::may_fit_plainly(int64_t items) const {
  if (does_not_fit(items)) {
    return false;
  }
  const auto more = tried_.upper_bound(items);
  if (more == tried_.end() || more->second.slices > 1) {
    return true;
  }
  const plan::Simulator& simulator = more->second.search().simulator;
  const int64_t peak = simulator.run(plan::keep_all(simulator.profile())).peak_bytes / more->first * items;
  return peak <= limits_->budget - device_memory(limits_->device.type()).live(limits_->device);
}

// False: the micro-batch does not run within the budget.
bool StepTrials::try_one(const StepToPlan& step, int64_t items, const Way& way) {
  const SliceScope scope(way.slices);
  tried_.erase(items);
  try {
    profile(step, items, way);
  } catch (const DistributedError&) {
    throw;
  } catch (const std::exception& error) {
    const bool is_memory = is_out_of_memory(error);
    const bool is_misuse = dynamic_cast<const ConfigError*>(&error) != nullptr;
    const bool may_fail =
        measured_for_ > 0 || way.plan != nullptr || (items < step.counts.batch && step.micro_batch == 0);
    if (dynamic_cast<const PlanningMisuse*>(&error) != nullptr || is_interrupt(error) ||
        (!is_memory && ((is_misuse && measured_for_ == 0) || !may_fail))) {
      throw;
    }
    const std::string line = fmt::format(
        "{:>12} {}{}\n", items, way.slices > 1 ? fmt::format("in {} slices ", way.slices) : "",
        is_memory ? "does not run within the budget"
                  : fmt::format("does not run: {}", first_line(error)));  // some models do not take a single item
    if (!way.only_so && untried_.find(line) == std::string::npos) {
      untried_ += line;
    }
  }
  can_slice_ = can_slice_ || scope.was_asked();
  const bool has_run = tried_.contains(items);
  if (step.micro_batch == 0 && pinned_by_.empty()) {  // otherwise the answer is known
    pinned_by_ = step.trial.pinned_by();
    if (has_run && pinned_by_.empty() && !limits_->splits_batch_norm) {
      pinned_by_ = normalises_by_batch(tried_.at(items).profile);
    }
  }
  return has_run;
}

// None: the profiles of both micro-batches have no line between them.
std::optional<StepTrials::Tried> StepTrials::predicted(int64_t small, int64_t large, int64_t items) const {
  const Tried &few = tried_.at(small), &more = tried_.at(large);
  std::optional<plan::Profile> profile = plan::extrapolated({few.profile, small}, {more.profile, large}, items);
  if (!profile) {
    return std::nullopt;
  }
  return Tried{.profile = *std::move(profile),
               .loaded_bytes = more.loaded_bytes * items / large,
               .slices = more.slices,
               .is_predicted = true};
}

// Tries two micro-batches that tell of more items. The first run is cold.
bool StepTrials::try_both(const StepToPlan& step, int64_t large, size_t runs) {
  return (tried_.contains(large / 2) || try_one(step, large / 2, {.runs = runs})) && try_one(step, large, {.runs = 1});
}

// Predicts `items` from both micro-batches of `from`. False: no line goes through both.
bool StepTrials::predict(int64_t items, const StepTrials& from, int64_t large) {
  if (std::optional<Tried> one = from.predicted(large / 2, large, items); one && !tried_.contains(items)) {
    tried_.emplace(items, *std::move(one));
  }
  return tried_.contains(items);
}

// Predicts `most` items from `parts`, which have gradients beside them as `most` items have, and are no micro-batches
// of the step. Returns the items of the larger part; 0: no prediction.
int64_t StepTrials::predict_whole(const StepToPlan& step, int64_t most, StepTrials& parts) {
  parts.measured_for_ = most;
  parts.tried_.clear();
  for (int64_t large = most < kLeastToPredictWell ? 2 : std::max<int64_t>(most / 8, 4);; large *= 2) {
    if (!parts.try_both(step, large, 2)) {
      return 0;
    }
    counts_ = parts.counts_;
    pinned_by_ = parts.pinned_by_;
    can_slice_ = parts.can_slice_;
    if (predict(most, parts, large)) {
      return large;
    }
    if (large > 2) {  // a single item often has other operators
      return 0;
    }
  }
}

// Predicts half of `most` items, half of the half and so on. False: predictions do not help.
bool StepTrials::predict_halves(const StepToPlan& step, int64_t most, StepTrials& parts, int64_t large) {
  if (!try_both(step, large, 1)) {
    return false;
  }
  // The parts take no more time than with gradients beside them. Without this, one slow run of a part would let more
  // micro-batches look faster.
  if (const auto whole = tried_.find(most); whole != tried_.end() && whole->second.is_predicted) {
    for (const int64_t part : {large / 2, large}) {
      plan::take_least_times(parts.tried_.at(part).profile, tried_.at(part).profile);
    }
    tried_.erase(whole);
    predict(most, parts, large);
  }
  int64_t items = most;
  for (int candidate = 1; candidate < kCandidates && items > 1 && !is_enough(items); ++candidate) {
    items /= 2;
    if (!predict(items, *this, large)) {
      return false;
    }
  }
  std::erase_if(tried_, [&](const auto& entry) { return entry.first < items; });
  return true;
}

// Whether a prediction shows that no plan fits. A prediction may be wrong, so the bound must be clearly above the
// budget.
bool StepTrials::is_hopeless(int64_t items) const {
  const int64_t bound = plan::lower_bound_bytes(tried_.at(items).search().simulator);
  return bytes_beside(items, with_state(farthest_state())) + bound > limits_->budget + limits_->budget / 16;
}

// Whether smaller micro-batches would not be chosen, because they take nearly as much time without a plan. The tape is
// not counted: where its time matters, calling the operators of more micro-batches takes longer.
bool StepTrials::is_enough(int64_t items) const {
  const Found found = search(items);
  if (!found.search.choice || found.placement.state != nearest_state()) {
    return false;
  }
  const plan::Profile& profile = tried_.at(items).profile;
  const double kept_under_tape = profile.step_seconds(profile.operator_seconds(), /*has_tape=*/true);
  return found.search.choice->plan.seconds <= plan::kApart * kept_under_tape;
}

// Runs the best micro-batch, until the best is not only predicted. False: nothing fits.
bool StepTrials::run_the_best(const StepToPlan& step) {
  for (;;) {
    const Found found = search(0);
    if (!found.search.choice) {
      return false;
    }
    const int64_t items = found.search.choice->items;
    if (!tried_.at(items).is_predicted) {
      for (const plan::Considered& one : found.search.considered) {
        predictions_ += tried_.at(one.items).is_predicted ? one.row("(predicted)") : "";
      }
      return true;
    }
    placement_ = found.placement;
    run_predicted(step, items);
  }
}

// Runs a predicted micro-batch under the plan of the prediction, so that the micro-batch has a profile of its own. A
// micro-batch may take a little more than predicted, because workspaces grow in steps. So a plan that fails is followed
// by a plan with fewer bytes, and so is a plain run. The short search has found a plan, so the longer search has a plan
// for the first budget.
void StepTrials::run_predicted(const StepToPlan& step, int64_t items) {
  const Tried predicted = tried_.at(items);
  const plan::Simulator& simulator = predicted.search().simulator;
  plan::Solver& solver = predicted.search().solver;
  solver.search_longer({});
  const int64_t plain = simulator.run(plan::keep_all(simulator.profile())).peak_bytes;
  int64_t within = room(items);
  for (int tries = 0; tries < 2; ++tries, within -= within / kLessAfterFailure) {
    within = does_not_fit(items) ? std::min(within, plain - plain / kLessAfterFailure) : within;
    const plan::Answer answer = solver.solve(within);
    const auto* plan = std::get_if<plan::Solution>(&answer);
    if (plan == nullptr) {
      continue;
    }
    std::optional<ActivationPlan> under;
    if (!is_plain(*plan)) {
      under = PlanContent::make_plan(simulator, *plan);
    }
    if (try_one(step, items, {.plan = under ? &*under : nullptr, .only_so = true, .runs = 1})) {
      Tried& tried = tried_.at(items);
      plan::limit_times(tried.profile, predicted.profile);
      if (tried.verified && tried.search().simulator.run(*tried.verified).peak_bytes <= room(items)) {
        tried.search().solver.accept(*tried.verified, room(items));
      }
      return;
    }
    least_too_many_ = under ? least_too_many_ : items;
  }
  tried_.erase(items);
}

// Returns the smallest micro-batch that may be tried.
int64_t StepTrials::try_all(const StepToPlan& step, const Choice* before) {
  if (step.micro_batch > 0) {
    const int64_t items = std::min(step.micro_batch, step.counts.batch);
    const int64_t slices = before != nullptr && before->items == items ? before->slices : 1;
    if (slices > 1 || (!fits_or_is_predicted(step, items) && !tried_.contains(items) && !hopeless_)) {
      try_one(step, items, {.slices = slices});
    }
    return items;
  }
  if (counts_.at_most != RankSplit::kWhole) {
    return try_at_most(step, before, most_items());
  }
  if (before != nullptr) {
    const int64_t items = std::min(before->items, step.counts.batch);
    if (try_one(step, items, {.slices = before->slices}) && search(items).search.choice) {
      return items;
    }
  }
  const bool fits = fits_or_is_predicted(step, step.counts.batch);
  return fits ? tried_.begin()->first : hopeless_ ? step.counts.batch : try_each(step);
}

// Whether `most` items fit plainly, or a prediction has found a micro-batch that fits. Few items, and carried state,
// are not predicted. Micro-batches that ran remain.
bool StepTrials::fits_or_is_predicted(const StepToPlan& step, int64_t most) {
  if (fits_plainly(step, most)) {
    return true;
  }
  if (most < kLeastToPredict || !step.trial.pinned_by().empty()) {
    return false;
  }
  StepTrials parts = *this;
  const int64_t large = predict_whole(step, most, parts);
  const bool may_be_cut = step.micro_batch == 0 && pinned_by_.empty();
  const bool helps = large > 0 && (((!may_be_cut || is_enough(most)) && run_the_best(step)) ||
                                   (may_be_cut && predict_halves(step, most, parts, large) && run_the_best(step)));
  if (!may_be_cut && tried_.contains(most) && is_hopeless(most)) {
    hopeless_ = tried_.at(most);
  }
  std::erase_if(tried_, [](const auto& entry) { return entry.second.is_predicted; });
  return helps;
}

// Runs the micro-batch without any plan. Most steps need no plan. The second run shows a state of the model that
// nobody takes back, and times that are not those of a cold start. True: nothing has to be rebuilt or offloaded, with
// the state in memory if the state may be there.
bool StepTrials::fits_plainly(const StepToPlan& step, int64_t items) {
  least_too_many_ = try_one(step, items, {.only_so = true}) ? 0 : items;
  if (does_not_fit(items)) {
    return false;
  }
  const plan::Simulator& simulator = tried_.at(items).search().simulator;
  const Placement placement = with_state(nearest_state());
  const int64_t peak = simulator.run(plan::keep_all(simulator.profile())).peak_bytes;
  return std::max(bytes_beside(items, placement) + peak, counts_.memory(placement).in_update()) <=
         limits_->budget - counts_.left_free;
}

// The batch, its half and so on, each with a profile of its own. Returns the smallest micro-batch that may be tried.
int64_t StepTrials::try_each(const StepToPlan& step) {
  int64_t tries = 0;
  for (int64_t items = step.counts.batch; items >= 1; items /= 2) {
    const bool is_whole_tried = items == step.counts.batch && is_least(step, items);
    // The first run of all is cold, and only two losses of the same items show a state that nobody takes back. Items
    // that do not fit have run already: plainly, as far as memory goes, and forward alone.
    const bool is_first = tried_.empty() && !does_not_fit(items);
    const bool has_run = tried_.contains(items) || try_one(step, items, {.runs = size_t{is_first ? 2u : 1u}});
    if (!pinned_by_.empty()) {
      return try_whole(step, is_whole_tried);
    }
    if ((has_run && is_enough(items)) || (++tries >= kCandidates && has_found())) {
      return items;
    }
  }
  // The gradients between micro-batches may take more than the whole batch.
  if (step.counts.batch > 1 && !tried_.contains(step.counts.batch) && !has_found()) {
    try_one(step, step.counts.batch, {.is_last_resort = true});
  }
  return 1;
}

// For a batch that must not be cut, as a trial of a part may have told. `was_tried`: by all means, because the batch
// was known to stay whole.
int64_t StepTrials::try_whole(const StepToPlan& step, bool was_tried) {
  std::erase_if(tried_, [&](const auto& entry) { return entry.first < step.counts.batch; });
  if (tried_.empty() && !was_tried) {
    try_one(step, step.counts.batch, {});
  }
  return step.counts.batch;
}

// Tries `items`, or half, or half of the half and so on. Returns the smallest micro-batch that may be tried.
int64_t StepTrials::try_at_most(const StepToPlan& step, const Choice* before, int64_t items) {
  for (;; items /= 2) {
    if (!tried_.contains(items) && items <= step.counts.batch) {
      try_one(step, items, {.slices = before != nullptr ? before->slices : 1});
    }
    if (!pinned_by_.empty()) {
      return try_whole(step, /*was_tried=*/false);
    }
    if (items == 1 || search(items).search.choice) {
      return items;
    }
  }
}

// Tries more and more slices while nothing fits.
void StepTrials::try_slices(const StepToPlan& step, int64_t items) {
  const auto tried = tried_.find(items);
  int64_t slices = tried != tried_.end() ? tried->second.slices : 1;
  while (slices < kMostSlices && can_slice_ && !search(0).search.choice) {
    slices *= kMoreSlices;
    try_one(step, items, {.slices = slices});
  }
}

// --- choosing

// The state's place. A file must be faster by more than measured times can tell. On the host the update is the CPU's,
// in bits and in time, so the state goes there only if nothing fits in memory. If nothing fits in either place, the
// place that asks for less.
StepTrials::Found StepTrials::search(int64_t only) const {
  const Placement in_memory_at = with_state(Place::Memory), farthest = with_state(farthest_state());
  if (state_must_be_outside_ || farthest.state == Place::Memory) {
    return {search_with(only, farthest), farthest, std::nullopt};
  }
  plan::Search memory = search_with(only, in_memory_at);
  if (memory.choice && farthest.state == Place::Host) {
    return {std::move(memory), in_memory_at, std::nullopt};
  }
  plan::Search away = search_with(only, farthest);
  const bool leaves = memory.choice && away.choice   ? plan::kApart * away.choice->seconds < memory.choice->seconds
                      : memory.choice || away.choice ? away.choice.has_value()
                                                     : away.smallest_feasible_bytes < memory.smallest_feasible_bytes;
  return leaves ? Found{std::move(away), farthest, std::move(memory)}
                : Found{std::move(memory), in_memory_at, std::move(away)};
}

// The time of the state's transfers to a file and back. The update itself runs beside the transfers, and is not
// counted.
double StepTrials::state_seconds(Placement placement) const {
  const int64_t moved = placement.state == Place::File ? counts_.state_in_file.moved : 0;
  return moved == 0 ? 0 : limits_->link.out_seconds(moved) + limits_->link.back_seconds(moved);
}

// Searches all micro-batches that were tried and are not too large for other ranks, or only micro-batches of `only`
// items.
plan::Search StepTrials::search_with(int64_t only, Placement placement) const {
  std::vector<plan::Candidate> candidates;
  for (const auto& [items, tried] : tried_) {
    if (only == 0 ? items <= counts_.at_most : items == only) {
      candidates.push_back({.items = items,
                            .simulator = &tried.search().simulator,
                            .own_bytes = loaded_bytes(items),
                            .solver = &tried.search().solver});
    }
  }
  if (candidates.empty()) {
    return {};
  }
  const StepMemory memory = counts_.memory(placement);
  return plan::search(candidates, {.batch = counts_.batch,
                                   .budget = limits_->budget - counts_.left_free,
                                   .fixed_bytes = memory.fixed,
                                   .gradient_bytes = memory.gradients,
                                   .optimizer_bytes = memory.workspace,
                                   .optimizer_seconds = state_seconds(placement)});
}

StepPlan StepTrials::choose(const StepToPlan& step, const Choice* before, int64_t same) {
  const auto forget_searches = c10::make_scope_exit([&] {
    for (const auto& [items, tried] : tried_) {
      tried.searches.reset();
    }
  });
  const int64_t first = counts_.at_most != RankSplit::kWhole ? most_items() : same;
  // Trying stopped at the first micro-batch that fits. If the plan of that micro-batch failed, smaller micro-batches
  // are tried.
  int64_t smallest = tried_.empty() || step.micro_batch > 0 ? 1 : tried_.begin()->first;
  bool has_failed = false;
  for (;;) {
    Found found = search(first);
    if (!found.search.choice && first > 0) {
      found = search(0);
    }
    if (found.search.choice) {
      placement_ = found.placement;
      if (std::optional<StepPlan> plan = make_plan(step, found)) {
        return *std::move(plan);
      }
      has_failed = true;
    } else if (has_failed && smallest > 1 && pinned_by_.empty()) {
      smallest = try_at_most(step, before, smallest / 2);
    } else {
      const int64_t left_free = std::exchange(counts_.left_free, 0);
      plan::Search least = tried_.empty() ? smallest_budget(step) : std::move(found.search);
      if (left_free > 0 && least.smallest_feasible_bytes > 0) {
        least.smallest_feasible_bytes += left_free;
        least.least_is += least.least_is.empty() ? "" : fmt::format("; {} are left free", Bytes(left_free).str());
      }
      refuse(least, has_failed);
    }
  }
}

void StepTrials::refuse_if_known() const {
  if (const plan::Search found = search(0).search; found.smallest_feasible_bytes > limits_->budget) {
    refuse(found, /*has_failed=*/false);
  }
}

// None in two cases:
// - Recomputation has other bits each time, or takes more memory than predicted and does not fit. Then the micro-batch
//   is excluded.
// - The plan ran out of memory. Then more memory is left free.
std::optional<StepPlan> StepTrials::make_plan(const StepToPlan& step, const Found& found) {
  const Tried& tried = tried_.at(found.search.choice->items);
  const SliceScope slices(tried.slices);
  StepPlan plan{.budget_bytes = limits_->budget,
                .choice = step_choice(*found.search.choice),
                .slices = tried.slices,
                .placement = found.placement,
                .considered = found.search.explain() + predictions_ + untried_ + told_of_state(found) +
                              step.trial.explain_shards(),
                .bytes = step.trial.bytes(found.placement)};
  StepChoice& choice = plan.choice;
  if (!pinned_by_.empty()) {
    plan.considered += fmt::format("The batch is not split because of {}.\n", pinned_by_);
  }
  if (!is_plain(*choice.plan) && tried.verified == choice.plan->stays) {
    plan.activations = PlanContent::make_plan(tried.search().simulator, *choice.plan);
  } else if (!is_plain(*choice.plan)) {
    const auto gradients = gradients_held(step.trial, holds_gradients(step, choice.items));
    try {
      step.trial.load(choice.items);
      plan.activations = plan_activations(
          tried.profile, [&] { return step.trial.loss(); }, Bytes(room(choice.items)), *choice.plan,
          step.trial.journal());
    } catch (const BudgetExceeded&) {
      untried_ +=
          fmt::format("{:>12} does not compute the same again, or takes more memory than predicted\n", choice.items);
      tried_.erase(choice.items);
      return std::nullopt;
    } catch (const std::exception& error) {
      if (!is_out_of_memory(error)) {
        throw;
      }
      counts_.left_free = more_left_free();
      untried_ += fmt::format("{:>12} ran out of memory when its plan was tried: {} are left free\n", choice.items,
                              Bytes(counts_.left_free).str());
      return std::nullopt;
    }
  }
  if (plan.activations) {
    choice.plan = std::make_shared<const plan::Solution>(solution_of(*plan.activations));
    choice.peak_bytes = std::max(counts_.memory(plan.placement).in_update(),
                                 bytes_beside(choice.items, plan.placement) + choice.plan->peak_bytes);
  }
  plan.bytes.activations = bytes_of_activations(
      plan.activations ? PlanContent::of(*plan.activations).simulator() : tried.search().simulator, *choice.plan);
  return plan;
}

// Says in which place the optimizer's state is, and why, or how fast the step would be with the state in the other
// place.
std::string StepTrials::told_of_state(const Found& found) const {
  if (!counts_.state_in_file.can_leave()) {
    return {};
  }
  const bool is_outside = found.placement.state != Place::Memory;
  const bool may_be_on_host = outside() == Place::Host;
  const std::string_view outside_is = may_be_on_host ? "on the host" : "in a file";
  std::string elsewhere = found.placement.model != Place::Memory ? "so are weights and gradients"
                          : limits_->state_must_leave            ? "its optimizer cannot update it in memory"
                          : is_outside                           ? "an earlier plan had it there"
                                                                 : "the host gets it only if nothing fits in memory";
  if (found.elsewhere) {
    const std::string_view where = is_outside ? "in memory" : outside_is;
    const auto& other = found.elsewhere->choice;
    elsewhere = other ? fmt::format("{} a step takes {:.3f} ms", where, 1e3 * other->seconds)
                      : fmt::format("nothing fits {}", where);
  }
  return fmt::format("The optimizer's state, {}, is {}; {}.\n", Bytes(counts_.state_in_file.moved).str(),
                     !is_outside      ? "in memory"
                     : may_be_on_host ? "on the host, where the CPU makes the updates, in a time that is not foreseen"
                                      : fmt::format("in a file, which takes {:.3f} ms of a step and a workspace of {}",
                                                    1e3 * state_seconds(found.placement),
                                                    Bytes(counts_.state_in_file.workspace).str()),
                     elsewhere);
}

// For a step of which nothing ran within the budget: two parts of the smallest permitted micro-batch tell how much the
// micro-batch takes. 0 bytes: unknown, because no more than the budget may be alive.
plan::Search StepTrials::smallest_budget(const StepToPlan& step) const {
  const int64_t items = step.micro_batch > 0 ? std::min(step.micro_batch, step.counts.batch) : step.counts.batch;
  if (!is_least(step, items)) {
    return {};  // a single item has not run
  }
  StepTrials parts = *this;
  if (hopeless_ && !can_slice_) {
    return parts.smallest_budget_of(items, *hopeless_);
  }
  parts.measured_for_ = items;
  const int64_t slices = can_slice_ ? kMostSlices : 1;
  for (int64_t part = items / 2; part >= 2; part /= 2) {
    if (!parts.try_one(step, part, {.slices = slices}) || !parts.try_one(step, part / 2, {.slices = slices})) {
      continue;
    }
    std::optional<Tried> whole = parts.predicted(part / 2, part, items);
    return whole ? parts.smallest_budget_of(items, *std::move(whole)) : plan::Search();
  }
  return {};
}

plan::Search StepTrials::smallest_budget_of(int64_t items, Tried predicted) {
  constexpr int64_t kSmallThings = 8 << 10;  // small tensors at the beginning of a step
  const Tried& whole = tried_.insert_or_assign(items, std::move(predicted)).first->second;
  const plan::Solution least = whole.search().solver.smallest();
  const Placement farthest = with_state(farthest_state());
  const int64_t beside = bytes_beside(items, farthest);
  // The step is tried under a guess first. A guess takes more than the least.
  const int64_t peak = std::min(least.peak_bytes + least.peak_bytes / 32, least.plain_peak_bytes);
  const int64_t in_update = counts_.memory(farthest).in_update();
  return {.smallest_feasible_bytes = std::max(in_update, beside + peak) + kSmallThings,
          .least_is = in_update > beside + peak
                          ? std::string()
                          : plan::sentence(whole.search().simulator.at_peak(least.stays), beside)};
}

// Without a choice. A bound of 0 is unknown. A smallest budget within the budget is not named, because the step ran out
// of memory in as little. `has_failed`: plans within the budget were found, and failed when they were run.
void StepTrials::refuse(const plan::Search& found, bool has_failed) const {
  const int64_t smallest = found.smallest_feasible_bytes > limits_->budget ? found.smallest_feasible_bytes : 0;
  const int64_t bound = found.lower_bound_bytes;
  std::string text = fmt::format("Stepper: no plan was found that runs a step of {} items within the memory budget {}",
                                 counts_.batch, Bytes(limits_->budget).str());
  if (!pinned_by_.empty()) {
    text += fmt::format("; the batch is not split because of {}", pinned_by_);
  }
  if (smallest > 0) {
    text += fmt::format("; {} ({} bytes) would do", Bytes(smallest).str(), smallest);
    if (bound > 0) {
      text += fmt::format(", and no plan of what was tried takes less than {} ({} bytes)", Bytes(bound).str(), bound);
    }
    text += found.least_is.empty() ? "" : "; " + found.least_is;
  }
  if (smallest == 0) {
    const int64_t least = counts_.memory(with_state(farthest_state())).in_update();
    text += least > limits_->budget
                ? fmt::format("; weights, gradients, the optimizer's state and what an update takes are {} ({} bytes)",
                              Bytes(least).str(), least)
            : has_failed ? std::string(
                               "; plans within it were found, and did not compute the same again, or took more memory "
                               "than predicted, when they were run")
                         : std::string(
                               "; the least of it that can be run needs more, and how much is not known, since nothing "
                               "was run beyond it");
  }
  throw BudgetExceeded(text, Bytes(smallest));
}

}  // namespace snug::detail
