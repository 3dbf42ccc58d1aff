// How a step is repeated
//
// A plan predicts memory, and a prediction may fail: other operators run, data make a result larger, an allocator
// leaves gaps. A failed prediction must not end a run of days. Three answers are possible:
//
// - A reserve for every error. The reserve makes every step slower.
// - A copy of everything that a step changes, before each step. The copies take the memory that the budget lacks.
// - A journal of changes. EffectJournal copies memory when the step first writes the memory, and takes changes back.
//
// snug takes the journal. Stepper::Impl::make_or_repeat calls, in this order, after a try that ran out of memory:
//
//   take_less        the plan leaves more memory free, or is made again, by the table in plan_life.h
//   (ranks decide)   StepRanks: all ranks repeat the step, or no rank does
//   go_back          the journal takes back the changes
//   count_step_down  at most four repetitions; or give_up: plans return to the plans before the step
//
// Limits:
// - The journal ends before parameters are written. A failure afterwards is not repeated.
// - A later micro-batch of accumulate() is not repeated, but the next call already has the plan that takes less.
// - Several ranks can repeat only a whole step together.

#include "src/step/step_budget.h"

#include <utility>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include "snug/autocast.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "snug/plan.h"
#include "src/core/allocated_bytes.h"
#include "src/core/optimizer_capabilities.h"
#include "src/memory/device.h"
#include "src/memory/evictable.h"
#include "src/memory/limit_paused.h"

namespace snug::detail {
namespace {

int64_t weight_bytes(const torch::nn::Module& model, const TrainedParameters& parameters) {
  AllocatedBytes bytes;
  for (const auto& tensors : {model.parameters(), model.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      bytes.add(tensor);
    }
  }
  for (const auto& [name, tensor] : parameters.full_precision()) {
    bytes.add(tensor);
  }
  return bytes.count();
}

// Of state that can leave memory, nearly all leaves. Counters of steps and a frozen parameter's state stay. Counting
// tensors in a file would read the tensors. Without plans for its place, a device's state is where the program has put
// the state.
PlacedBytes state_bytes(const torch::optim::Optimizer& optimizer, const PartInFile& in_file, c10::Device device) {
  if (in_file.can_leave()) {
    return {.in_memory = in_file.moved};
  }
  AllocatedBytes in_memory, outside;
  for (const at::Tensor& tensor : state_tensors(optimizer)) {
    if (tensor.defined()) {
      (tensor.is_cpu() == device.is_cpu() ? in_memory : outside).add(tensor);
    }
  }
  return {.in_memory = in_memory.count() + state_bytes_to_come(optimizer), .outside = outside.count()};
}

// None: the state stays in memory. On a device, an update of a state on the host has the CPU's bits, and each rank
// plans for itself. So ranks that make the same update each keep their state on the device.
std::optional<std::filesystem::path> directory_of_state(torch::optim::Optimizer& optimizer,
                                                        const StepperOptions& options, const StepRanks& ranks,
                                                        c10::Device device) {
  const bool may_leave = device.is_cpu() || ranks.is_alone() || capabilities_of(optimizer).update.agrees_across_ranks();
  return may_leave ? options.budget.offload : std::nullopt;
}

// None: the model stays in memory. Reasons:
// - An update of all parameters at once would bring all parameters into memory.
// - Gradients that other ranks add to lie in buckets.
// - Masters on the CPU are not part of the model.
std::optional<std::filesystem::path> directory_of_model(const StepperOptions& options, const StatePlace& state_place,
                                                        const StepRanks& ranks, c10::Device device) {
  const bool can_leave = options.budget.plan && !options.budget.memory.is_unlimited() &&
                         state_place.bytes().can_leave() && ranks.is_alone() &&
                         (options.weights == Weights::Full || !device.is_cpu());
  return can_leave ? options.budget.offload : std::nullopt;
}

}  // namespace

// In a step each parameter has three scalars: two scalars of an optimizer such as AdamW, and the norm. On a CPU the
// scalars are small.
int64_t StepBudget::own_bytes() const {
  constexpr int64_t kScalar = sizeof(float), kScalars = 3, kSmallThings = 16 << 10;
  const int64_t rounding = allocated_bytes(kScalar, parameters_.device()) - kScalar;
  return kSmallThings + kScalars * rounding * static_cast<int64_t>(parameters_.all().size());
}

BytesByKind StepBudget::bytes(Placement placement) const {
  BytesByKind bytes;
  bytes.weights.in_memory = weight_bytes(model_, parameters_);
  bytes.gradients.in_memory = parameters_.bytes_of_all_gradients();
  const PlacedBytes of_others = ranks_.weights_of_others();
  bytes.weights.in_memory += of_others.in_memory - of_others.outside;
  bytes.weights.outside = of_others.outside;
  const PartInFile state_in_file = state_place_.bytes();
  bytes.optimizer_state = state_bytes(optimizer_, state_in_file, parameters_.device());
  if (placement.state != Place::Memory) {
    bytes.optimizer_state.outside += state_in_file.moved;
    bytes.optimizer_state.in_memory -= state_in_file.moved;
  }
  if (placement.model != Place::Memory) {
    const PartInFile in_file = model_place_.bytes();
    const int64_t window = model_place_.window_bytes(), small_gradients = in_file.beside - window;
    bytes.weights.outside = in_file.moved;
    bytes.weights.in_memory += window - in_file.moved;
    bytes.gradients.outside = bytes.gradients.in_memory - small_gradients;
    bytes.gradients.in_memory = small_gradients;
  }
  return bytes;
}

int64_t StepBudget::workspace_bytes() const {
  const MovableState* const state = capabilities_of(optimizer_).movable_state;
  const bool is_by_hand = state != nullptr && !state_place_.bytes().can_leave();
  const auto by_hand =
      is_by_hand ? state->bytes_with_state_in(state->state_placement()) : MovableState::PlacementBytes();
  return by_hand.moved > 0 ? by_hand.workspace : detail::workspace_bytes(optimizer_);
}

StepBudget::StepBudget(torch::nn::Module& model, torch::optim::Optimizer& optimizer, const StepperOptions& options,
                       StepRanks& ranks, TrainedParameters& parameters)
    : ranks_(ranks),
      parameters_(parameters),
      budget_(options.budget.memory),
      state_place_(optimizer, directory_of_state(optimizer, options, ranks, parameters.device()), parameters.device()),
      model_place_(model, parameters, directory_of_model(options, state_place_, ranks, parameters.device())),
      model_(model),
      optimizer_(optimizer),
      carried_(options.budget.carried) {
  const c10::Device device = parameters.device();
  const bool plans = options.budget.plan && (device.is_cpu() || at::isAccelerator(device.type()));
  budget_ = ranks.smallest_budget(options.budget.memory, plans);
  if (!plans || budget_.is_unlimited()) {
    return;
  }
  take_workspaces(device);
  Autocast::clear_cache();
  OffloadLink link;
  try {
    link = options.budget.offload ? measure_offload_link(*options.budget.offload, device) : OffloadLink{};
    state_place_.put(state_place_.outside());
  } catch (...) {  // the other ranks wait for this rank in check()
    no_link_ = std::current_exception();
  }
  planner_.emplace(budget_, options.budget.split_batch_norm, std::move(link), device, options.budget.plan_folder);
  if (state_place_.must_leave()) {
    planner_->keep_state_outside();
  }
}

void StepBudget::check() {
  ranks_.widen_window(0);  // an earlier Stepper of the same DataParallel may have left a larger window
  if (planner_ && (live_bytes(parameters_.device()) > budget_ || model_place_.was_made_outside())) {
    model_place_.put(model_place_.outside());
  }
  ranks_.make_all_fit(budget_, [this] { return live_bytes(parameters_.device()).count(); }, no_link_);
  check_budget(budget_, parameters_.device());
}

// Ranks that have planned for such a step before need not try anything. If all ranks have planned, all go on at once.
// If a rank finds no plan, all ranks shard their weights and plan anew, once.
const StepPlan* StepBudget::plan(StepToPlan step) {
  if (ranks_.is_alone()) {
    return step.counts.batch > 0 ? plan_here(step) : nullptr;
  }
  RankSplit own = planner_->look(step);
  own.has_no_plan = std::exchange(asks_for_shards_, false) && ranks_.can_shard_weights() ? 1 : 0;
  AgreedSplit all = ranks_.agree_on_split(own);
  while (!all.is_settled) {
    step.counts.at_most = all.at_most;
    if (all.shards_weights) {
      const LimitPaused unlimited(parameters_.device(), budget_);  // no rank may fail alone
      ranks_.shard_weights();
      planner_->forget_plans();
      step.counts.fixed_bytes = step.trial.fixed_bytes();
      step.counts.optimizer_bytes = workspace_bytes();
      own = planner_->look(step);
    } else if (step.counts.batch > 0) {
      own = plan_or_report(step);
    }
    all = ranks_.agree_on_split(own);
  }
  planner_->keep(step, all);
  return step.counts.batch > 0 ? planner_->last() : nullptr;
}

RankSplit StepBudget::plan_or_report(const StepToPlan& step) {
  try {
    plan_here(step);
    return planner_->planned(step);
  } catch (const BudgetExceeded&) {
    if (!ranks_.can_shard_weights()) {
      throw;
    }
  }
  journal_.take_back();
  end_trials(step);
  return {.at_most = step.counts.at_most, .batch = step.counts.batch, .has_no_plan = 1};
}

const StepPlan* StepBudget::plan_here(const StepToPlan& step) {
  const auto rehearsal = ranks_.rehearse();
  const StepPlan* plan = planner_->plan(step);
  end_trials(step);
  return plan;
}

void StepBudget::end_trials(const StepToPlan& step) {
  step.trial.unload();
  if (!step.is_within_window) {
    model_place_.begin();          // trials have left gradients in files
    parameters_.drop_gradients();  // and gradients exist if loss_of went backward by Python's own engine
  }
}

void StepBudget::forget_tries() {
  if (planner_) {
    planner_->forget_tries();
  }
  tries_ = {.evicted_before = evicted_bytes()};
}

void StepBudget::begin_step() {
  if (planner_) {
    journal_.begin(model_.buffers(), carried_);
  }
}

// Each rank takes less of its own memory. If another rank ran out of memory, this rank has nothing to do.
bool StepBudget::take_less(Repeats repeats) {
  constexpr int64_t kMostStepDowns = 4;
  if (!planner_ || ranks_.is_dropped() || !journal_.is_open()) {
    return false;
  }
  const bool keeps_all = planner_->last() != nullptr && planner_->watched() == nullptr;
  const bool is_as_planned = tries_.deviation.empty() && !keeps_all;
  if (!planner_->step_down(is_as_planned         ? PlanEvent::NoRoom
                           : tries_.follows_plan ? PlanEvent::NoRoomLarger
                                                 : PlanEvent::NoRoomOtherwise)) {
    return false;
  }
  const bool can_repeat = repeats == Repeats::OnAllRanks || (repeats == Repeats::Alone && ranks_.is_alone());
  if (!can_repeat) {
    planner_->settle(PlanEvent::Made);  // for the next call
  }
  return can_repeat && tries_.step_downs < kMostStepDowns;
}

void StepBudget::go_back() {
  tries_ = {.step_downs = tries_.step_downs, .evicted_before = evicted_bytes()};
  journal_.take_back();
}

void StepBudget::give_up() {
  if (planner_) {
    planner_->give_up();
  }
}

Loss StepBudget::forward(const std::function<Loss()>& forward) {
  const ActivationPlan* watched = planner_ ? planner_->watched() : nullptr;
  if (watched == nullptr) {
    return forward();
  }
  const Rematerialize scope(*watched);
  const auto note_deviation = c10::make_scope_exit([&] {
    if (tries_.deviation.empty()) {
      tries_.deviation = scope.deviation();
    }
    tries_.follows_plan = tries_.follows_plan && scope.follows_plan();
  });
  return forward();
}

void StepBudget::finish(StepResult& result) {
  Tries tries = std::exchange(tries_, {});
  result.step_downs = tries.step_downs;
  result.plan_deviation = std::move(tries.deviation);
  if (planner_) {
    const bool has_evicted = evicted_bytes() > tries.evicted_before;
    planner_->settle(tries.follows_plan ? PlanEvent::Made
                     : has_evicted      ? PlanEvent::MadeByEviction
                                        : PlanEvent::MadeOtherwise);
    planner_->save();
  }
}

}  // namespace snug::detail
