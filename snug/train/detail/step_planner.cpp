#include "snug/train/detail/step_planner.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "snug/activations/detail/slice_scope.h"
#include "snug/core/detail/first_line.h"
#include "snug/core/error.h"
#include "snug/memory/detail/cpu_allocator.h"
#include "snug/train/detail/same_losses.h"

namespace snug::detail {
namespace {

// Slices are tried coarsely: each try is a step that may run out of memory, and more of them than needed cost little.
constexpr int64_t kMoreSlices = 4, kMostSlices = 256;
constexpr int64_t kCandidates = 6;  // the batch, its half, ... its 32nd part; smaller ones only if none of these fits

int64_t elements(const BatchShape& shape) {
  int64_t count = 0;
  for (const auto& [type, sizes] : shape.tensors) {
    int64_t of_one = 1;
    for (const int64_t size : sizes) {
      of_one *= size;
    }
    count += of_one;
  }
  return count;
}

// Whether a plan for batches of shape `large` will do for `small`: no side is longer, and not much is wasted.
bool covers(const BatchShape& large, const BatchShape& small) {
  if (large == small) {
    return true;
  }
  if (large.tensors.size() != small.tensors.size()) {
    return false;
  }
  for (size_t i = 0; i < large.tensors.size(); ++i) {
    const auto& [large_type, large_sizes] = large.tensors[i];
    const auto& [small_type, small_sizes] = small.tensors[i];
    if (large_type != small_type || large_sizes.size() != small_sizes.size() ||
        !std::equal(large_sizes.begin(), large_sizes.end(), small_sizes.begin(), std::greater_equal<>())) {
      return false;
    }
  }
  return 5 * elements(large) <= 6 * elements(small);
}

bool covers(const StepKind& large, const StepKind& small) {
  return large.is_training == small.is_training && large.trained == small.trained && covers(large.shape, small.shape);
}

// Statistics of the batch are not those of its parts. Operators that write to what was there before keep running ones.
std::string normalises_by_batch(const StepProfile& profile) {
  for (const ProfiledOperator& op : profile.operators) {
    if (op.name.find("batch_norm") != std::string::npos) {
      return op.name;
    }
    for (const ValueId& value : op.writes) {
      if (profile.storages[static_cast<size_t>(value.storage)].kind == StorageKind::External) {
        return op.name + ", which writes a buffer";
      }
    }
  }
  return {};
}

// Gradients as the step will have them, while it is tried.
class GradientsHeld {
 public:
  GradientsHeld(const StepToPlan& step, bool held) : step_(step), held_(held) {
    if (held_) {
      step_.hold_gradients(true);
    }
  }
  ~GradientsHeld() {
    if (held_) {
      step_.hold_gradients(false);
    }
  }
  GradientsHeld(const GradientsHeld&) = delete;
  GradientsHeld& operator=(const GradientsHeld&) = delete;

 private:
  const StepToPlan& step_;
  bool held_;
};

}  // namespace

StepPlanner::Known* StepPlanner::find(const StepToPlan& step) {
  Known* found = nullptr;
  for (Known& known : known_) {
    const StepChoice& choice = known.plan.choice;
    // What was planned as one micro-batch has no room for the gradients that several keep.
    const bool large_enough = step.batch <= known.batch || choice.micro_batches > 1;
    const bool same_cut = step.micro_batch == 0 || std::min(step.micro_batch, step.batch) <= choice.items;
    if (large_enough && same_cut && covers(known.kind, step.kind) && (found == nullptr || known.kind == step.kind)) {
      found = &known;
    }
  }
  return found;
}

const StepPlan* StepPlanner::plan(const StepToPlan& step) {
  last_ = find(step);
  is_refused_ = false;
  if (step.is_within_window) {
    return last_ == nullptr ? nullptr : &last_->plan;
  }
  if (last_ == nullptr) {
    Known known{.kind = step.kind,
                .batch = step.batch,
                .fixed_bytes = step.fixed_bytes,
                .gradient_bytes = step.gradient_bytes,
                .optimizer_bytes = step.optimizer_bytes,
                .at_most = step.at_most};
    try_slices(known, step, try_all(known, step));
    choose(known, step);
    known_.remove_if([&](const Known& old) { return old.batch <= known.batch && covers(known.kind, old.kind); });
    last_ = &known_.emplace_back(std::move(known));
    return &last_->plan;
  }
  if (Known& known = *last_; is_outdated(known, step)) {
    known.fixed_bytes = std::max(known.fixed_bytes, known.fixed_bytes_of(step));
    known.idle_state_bytes = std::min(known.idle_state_bytes, step.state_bytes);
    known.at_most = step.at_most;
    const int64_t items =
        known.at_most != RankSplit::kWhole ? try_at_most(known, step, known.most_items()) : known.plan.choice.items;
    try_slices(known, step, items);
    choose(known, step);
  }
  return &last_->plan;
}

bool StepPlanner::is_outdated(const Known& known, const StepToPlan& step) const {
  const StepChoice& choice = known.plan.choice;
  const int64_t more = std::max<int64_t>(0, known.fixed_bytes_of(step) - known.fixed_bytes);
  return known.is_stale || choice.peak_bytes + more > budget_ - known.left_free ||
         std::min(choice.items, step.batch) > step.at_most;
}

// --- with other ranks

RankSplit StepPlanner::look(const StepToPlan& step) {
  last_ = step.batch > 0 ? find(step) : nullptr;
  is_refused_ = false;
  if (last_ != nullptr) {
    RankSplit own = planned(step);
    own.is_planned = !is_outdated(*last_, step);
    return own;
  }
  const Choice* const before = step.batch > 0 && step.micro_batch == 0 ? chosen_before(step) : nullptr;
  const bool was_cut = before != nullptr && before->items < before->batch;
  return {.at_most = was_cut ? before->items : RankSplit::kWhole, .batch = step.batch, .is_planned = step.batch == 0};
}

RankSplit StepPlanner::planned(const StepToPlan& step) const {
  const StepChoice& choice = last_->plan.choice;
  const int64_t chosen = choice.micro_batches > 1 ? choice.items : last_->at_most;
  return {.at_most = step.micro_batch > 0 ? RankSplit::kWhole : chosen, .batch = step.batch, .is_planned = true};
}

// It is remembered for the largest share of all, as any rank may be the one that saves it.
void StepPlanner::keep(const StepToPlan& step, const AgreedSplit& agreed) {
  if (last_ == nullptr || step.micro_batch > 0) {
    return;
  }
  Known& known = *last_;
  const int64_t batch = std::max(known.batch, agreed.largest_batch);
  if (known.at_most == agreed.at_most && known.shared_batch >= batch) {
    return;
  }
  known.at_most = agreed.at_most;
  known.shared_batch = batch;
  if (const bool is_whole = known.at_most == RankSplit::kWhole; is_whole || known.at_most < batch) {
    remember({known.kind, batch, is_whole ? batch : known.at_most, known.plan.slices});
  }
}

// --- trying

// False: it does not run within the budget.
bool StepPlanner::try_one(Known& known, const StepToPlan& step, int64_t items, int64_t slices) const {
  const auto note = [&](std::string_view what) {
    known.untried += fmt::format("{:>12} {}{}\n", items, slices > 1 ? fmt::format("in {} slices ", slices) : "", what);
  };
  const SliceScope scope(slices);
  known.tried.erase(items);
  try {
    const GradientsHeld gradients(step, known.micro_batches(items) > 1);
    step.unload();
    const int64_t before = live_cpu_bytes();
    const auto forward = step.forward(items);
    const int64_t loaded = live_cpu_bytes() - before;
    SameLosses losses;
    known.tried.insert_or_assign(items, Tried{profile_step(losses.of(forward), {.link = link_}), loaded, slices});
    known.fixed_bytes += known.idle_state_bytes;
    known.idle_state_bytes = step.idle_state_bytes();
    known.fixed_bytes -= known.idle_state_bytes;
  } catch (const c10::OutOfMemoryError&) {
    note("does not run within the budget");
  } catch (const ConfigError&) {
    throw;
  } catch (const DistributedError&) {
    throw;
  } catch (const std::exception& error) {
    if (items == step.batch || step.micro_batch > 0) {
      throw;
    }
    note(fmt::format("does not run: {}", first_line(error)));  // some models do not take a single item
  }
  known.can_slice = known.can_slice || scope.was_asked();
  if (known.pinned_by.empty()) {
    known.pinned_by = step.pinned_by();
  }
  const bool has_run = known.tried.contains(items);
  if (has_run && known.pinned_by.empty() && step.kind.is_training && !splits_batch_norm_) {
    known.pinned_by = normalises_by_batch(known.tried.at(items).profile);
  }
  return has_run;
}

// Returns the smallest that may be tried.
int64_t StepPlanner::try_all(Known& known, const StepToPlan& step) const {
  const Choice* const before = chosen_before(step);
  if (step.micro_batch > 0) {
    const int64_t items = std::min(step.micro_batch, step.batch);
    try_one(known, step, items, before != nullptr && before->items == items ? before->slices : 1);
    known.pinned_by.clear();  // the user has decided
    return items;
  }
  if (known.at_most != RankSplit::kWhole) {
    return try_at_most(known, step, known.most_items());
  }
  if (before != nullptr) {
    const int64_t items = std::min(before->items, step.batch);
    if (try_one(known, step, items, before->slices) && search(known, items).choice) {
      return items;
    }
  }
  int64_t tries = 0;
  bool is_feasible = false;
  for (int64_t items = step.batch; items >= 1; items /= 2) {
    const bool has_run = known.tried.contains(items) || try_one(known, step, items);
    if (!known.pinned_by.empty()) {
      std::erase_if(known.tried, [&](const auto& entry) { return entry.first < step.batch; });
      return step.batch;
    }
    is_feasible = is_feasible || (has_run && search(known, items).choice);
    if (++tries >= kCandidates && is_feasible) {
      return items;
    }
  }
  return 1;
}

// So many, or the half, or its half and so on. Returns the smallest that may be tried.
int64_t StepPlanner::try_at_most(Known& known, const StepToPlan& step, int64_t items) const {
  const Choice* const before = chosen_before(step);
  for (;; items /= 2) {
    if (!known.tried.contains(items) && items <= step.batch) {
      try_one(known, step, items, before != nullptr ? before->slices : 1);
    }
    if (!known.pinned_by.empty()) {
      std::erase_if(known.tried, [&](const auto& entry) { return entry.first < known.batch; });
      return known.batch;
    }
    if (items == 1 || search(known, items).choice) {
      return items;
    }
  }
}

// Where nothing fits: more and more of them.
void StepPlanner::try_slices(Known& known, const StepToPlan& step, int64_t items) const {
  const auto tried = known.tried.find(items);
  int64_t slices = tried != known.tried.end() ? tried->second.slices : 1;
  while (slices < kMostSlices && known.can_slice && !search(known, 0).choice) {
    slices *= kMoreSlices;
    try_one(known, step, items, slices);
  }
}

// --- choosing

// Over all micro-batches that were tried and are not too large for other ranks, or those of `only` items.
StepSearch StepPlanner::search(const Known& known, int64_t only) const {
  std::list<StepSimulator> simulators;
  std::vector<MicroBatchCandidate> candidates;
  for (const auto& [items, tried] : known.tried) {
    if (only == 0 ? items <= known.at_most : items == only) {
      candidates.push_back({.items = items,
                            .simulator = &simulators.emplace_back(tried.profile),
                            .own_bytes = known.loaded_bytes(items)});
    }
  }
  if (candidates.empty()) {
    return {};
  }
  return search_step(candidates, {.batch = known.batch,
                                  .budget = budget_ - known.left_free,
                                  .fixed_bytes = known.fixed_bytes,
                                  .gradient_bytes = known.gradient_bytes,
                                  .optimizer_bytes = known.optimizer_bytes});
}

void StepPlanner::choose(Known& known, const StepToPlan& step) {
  // After running out of memory: first of all with the same micro-batch, because then the bits are the same.
  const int64_t same = known.left_free > 0 ? known.plan.choice.items : 0;
  const int64_t first = known.at_most != RankSplit::kWhole ? known.most_items() : same;
  for (;;) {
    StepSearch found = search(known, first);
    if (!found.choice && first > 0) {
      found = search(known, 0);
    }
    is_refused_ = !found.choice;
    if (is_refused_) {
      const int64_t left_free = std::exchange(known.left_free, 0);
      refuse(known, known.tried.empty() ? smallest_budget(known, step) : found.smallest_feasible_bytes + left_free);
    }
    if (make_plan(known, step, found)) {
      known.is_stale = false;
      remember({known.kind, known.batch, known.plan.choice.items, known.plan.slices});
      return;
    }
    if (const int64_t less = found.choice->items / 2;
        known.at_most != RankSplit::kWhole && less >= 1 && known.pinned_by.empty()) {
      try_at_most(known, step, less);  // nothing below was tried
    }
  }
}

// False: what it would compute again has other bits each time, or more memory is taken than predicted, and within that it does not fit. Then it
// is out of the question.
bool StepPlanner::make_plan(Known& known, const StepToPlan& step, const StepSearch& found) const {
  StepPlan plan{.budget_bytes = budget_, .choice = *found.choice, .considered = found.explain() + known.untried};
  StepChoice& choice = plan.choice;
  plan.slices = known.tried.at(choice.items).slices;
  const SliceScope slices(plan.slices);
  if (!known.pinned_by.empty()) {
    plan.considered += fmt::format("The batch is not split because of {}.\n", known.pinned_by);
  }
  if (choice.plan.seconds > choice.plan.plain_seconds) {
    const int64_t beside = known.bytes_beside(choice.items);
    const GradientsHeld gradients(step, choice.micro_batches > 1);
    try {
      plan.activations = plan_activations(known.tried.at(choice.items).profile, step.forward(choice.items),
                                          Bytes(budget_ - known.left_free - beside));
    } catch (const BudgetExceeded&) {
      known.untried +=
          fmt::format("{:>12} does not compute the same again, or takes more memory than predicted\n", choice.items);
      known.tried.erase(choice.items);
      return false;
    }
    choice.plan = plan.activations->choice();
    choice.peak_bytes =
        std::max(known.fixed_bytes + known.gradient_bytes + known.optimizer_bytes, beside + choice.plan.peak_bytes);
  }
  known.plan = std::move(plan);
  return true;
}

// Where nothing ran within the budget: by a run without it, as frugal as can be, of the least that can be run at once.
int64_t StepPlanner::smallest_budget(Known known, const StepToPlan& step) const {
  const CpuLimitPaused no_limit(budget_);
  const bool is_free = step.micro_batch == 0 && known.pinned_by.empty();
  for (int64_t items = is_free                ? 1
                       : step.micro_batch > 0 ? std::min(step.micro_batch, step.batch)
                                              : step.batch;
       ; items = std::min(2 * items, step.batch)) {
    if (try_one(known, step, items, known.can_slice ? kMostSlices : 1)) {
      return std::max(
          known.fixed_bytes + known.gradient_bytes + known.optimizer_bytes,
          known.bytes_beside(items) + PlanSolver(StepSimulator(known.tried.at(items).profile)).smallest().peak_bytes);
    }
    if (!is_free || items == step.batch) {
      return 0;
    }
  }
}

void StepPlanner::refuse(const Known& known, int64_t smallest) const {
  std::string text = fmt::format("Stepper: no plan was found that runs a step of {} items within memory_budget {}",
                                 known.batch, Bytes(budget_).str());
  if (!known.pinned_by.empty()) {
    text += fmt::format("; the batch is not split because of {}", known.pinned_by);
  }
  if (smallest > 0) {
    text += fmt::format("; {} ({} bytes) would do", Bytes(smallest).str(), smallest);
  }
  throw BudgetExceeded(text, Bytes(smallest));
}

// --- what was chosen

// For such a batch or a larger one, in this run or before it was saved.
const StepPlanner::Choice* StepPlanner::chosen_before(const StepToPlan& step) const {
  const Choice* found = nullptr;
  for (const Choice& choice : choices_) {
    // What was not cut says nothing of larger batches.
    const bool large_enough = step.batch <= choice.batch || choice.items < choice.batch;
    if (large_enough && covers(choice.kind, step.kind) && (found == nullptr || choice.kind == step.kind)) {
      found = &choice;
    }
  }
  return found;
}

// As its plan does, it takes the place of those that it covers.
void StepPlanner::remember(Choice choice) {
  std::erase_if(choices_,
                [&](const Choice& old) { return old.batch <= choice.batch && covers(choice.kind, old.kind); });
  choices_.push_back(std::move(choice));
}

void StepPlanner::set_choices(std::vector<Choice> choices) {
  choices_ = std::move(choices);
  known_.clear();
  last_ = nullptr;
}

// --- when it was not as planned

bool StepPlanner::step_down(bool had_other_operators) {
  if (last_ == nullptr || is_refused_) {
    return false;
  }
  if (had_other_operators) {
    forget();
    return true;
  }
  const int64_t for_activations = budget_ - last_->fixed_bytes;
  const int64_t more = std::max<int64_t>(4096, std::max(last_->left_free, for_activations / 32));
  if (last_->left_free + more > for_activations / 2) {
    return false;
  }
  if (!last_->before) {
    last_->before = {last_->left_free, last_->at_most, last_->plan, choices_};
  }
  last_->left_free += more;
  last_->is_stale = true;
  return true;
}

void StepPlanner::settle() {
  if (last_ != nullptr) {
    last_->before.reset();
  }
}

void StepPlanner::give_up() {
  if (last_ == nullptr || !last_->before) {
    return;
  }
  BeforeStepDown before = *std::exchange(last_->before, std::nullopt);
  last_->left_free = before.left_free;
  last_->at_most = before.at_most;
  last_->plan = std::move(before.plan);
  last_->is_stale = false;
  choices_ = std::move(before.choices);
}

void StepPlanner::forget() {
  if (last_ != nullptr) {
    known_.remove_if([&](const Known& known) { return &known == last_; });
    last_ = nullptr;
  }
}

}  // namespace snug::detail
