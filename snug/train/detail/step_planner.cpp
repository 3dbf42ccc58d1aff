#include "snug/train/detail/step_planner.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "snug/core/detail/first_line.h"
#include "snug/core/error.h"
#include "snug/core/stateful_optimizer.h"
#include "snug/memory/detail/cpu_allocator.h"

namespace snug::detail {
namespace {

using Json = nlohmann::json;

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
    if (known.is_training == step.is_training && large_enough && same_cut && covers(known.shape, step.shape) &&
        (found == nullptr || known.shape == step.shape)) {
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
    Known known{.shape = step.shape,
                .is_training = step.is_training,
                .batch = step.batch,
                .fixed_bytes = step.fixed_bytes,
                .gradient_bytes = step.gradient_bytes,
                .optimizer_bytes = step.optimizer_bytes};
    try_all(known, step);
    choose(known, step);
    known_.remove_if([&](const Known& old) {
      return old.is_training == known.is_training && old.batch <= known.batch && covers(known.shape, old.shape);
    });
    last_ = &known_.emplace_back(std::move(known));
    return &last_->plan;
  }
  Known& known = *last_;
  const int64_t more = std::max<int64_t>(0, step.fixed_bytes - known.fixed_bytes);
  if (known.is_stale || known.plan.choice.peak_bytes + more > budget_ - known.left_free) {
    known.fixed_bytes += more;
    choose(known, step);
  }
  return &known.plan;
}

// --- trying

// False: it does not run within the budget.
bool StepPlanner::try_one(Known& known, const StepToPlan& step, int64_t items) const {
  const auto note = [&](std::string_view what) { known.untried += fmt::format("{:>12} {}\n", items, what); };
  try {
    const GradientsHeld gradients(step, known.micro_batches(items) > 1);
    const int64_t before = live_cpu_bytes();
    const auto forward = step.forward(items);
    const int64_t loaded = live_cpu_bytes() - before;
    known.tried.insert_or_assign(items, Tried{profile_step(forward), loaded});
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
  if (known.pinned_by.empty()) {
    known.pinned_by = step.pinned_by();
  }
  const bool has_run = known.tried.contains(items);
  if (has_run && known.pinned_by.empty() && step.is_training && !splits_batch_norm_) {
    known.pinned_by = normalises_by_batch(known.tried.at(items).profile);
  }
  return has_run;
}

void StepPlanner::try_all(Known& known, const StepToPlan& step) const {
  if (step.micro_batch > 0) {
    try_one(known, step, std::min(step.micro_batch, step.batch));
    known.pinned_by.clear();  // the user has decided
    return;
  }
  const int64_t before = chosen_before(step);
  if (before > 0 && try_one(known, step, before) && search(known, before).choice) {
    return;
  }
  int64_t tries = 0;
  bool is_feasible = false;
  for (int64_t items = step.batch; items >= 1; items /= 2) {
    const bool has_run = known.tried.contains(items) || try_one(known, step, items);
    if (!known.pinned_by.empty()) {
      std::erase_if(known.tried, [&](const auto& entry) { return entry.first < step.batch; });
      return;
    }
    is_feasible = is_feasible || (has_run && search(known, items).choice);
    if (++tries >= kCandidates && is_feasible) {
      return;
    }
  }
}

// --- choosing

// Over all micro-batches that were tried, or those of `only` items.
StepSearch StepPlanner::search(const Known& known, int64_t only) const {
  std::list<StepSimulator> simulators;
  std::vector<MicroBatchCandidate> candidates;
  for (const auto& [items, tried] : known.tried) {
    if (only == 0 || items == only) {
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
  for (;;) {
    // After running out of memory: first of all with the same micro-batch, because then the bits are the same.
    StepSearch found = search(known, known.left_free > 0 ? known.plan.choice.items : 0);
    if (!found.choice && known.left_free > 0) {
      found = search(known, 0);
    }
    is_refused_ = !found.choice;
    if (is_refused_) {
      const int64_t left_free = std::exchange(known.left_free, 0);
      refuse(known, known.tried.empty() ? smallest_budget(known, step) : found.smallest_feasible_bytes + left_free);
    }
    if (make_plan(known, step, std::move(found))) {
      known.is_stale = false;
      remember_choice(known);
      return;
    }
  }
}

// False: what it would compute again has other bits each time, and without that it does not fit. Then it is out of the question.
bool StepPlanner::make_plan(Known& known, const StepToPlan& step, StepSearch found) const {
  StepPlan plan{.budget_bytes = budget_, .choice = *found.choice, .considered = found.explain() + known.untried};
  StepChoice& choice = plan.choice;
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
      known.untried += fmt::format("{:>12} does not compute the same again\n", choice.items);
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
    if (try_one(known, step, items)) {
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

// For the same batch, in this run or before it was saved; 0: nothing.
int64_t StepPlanner::chosen_before(const StepToPlan& step) const {
  for (const Choice& choice : choices_) {
    if (choice.is_training == step.is_training && choice.batch == step.batch && covers(choice.shape, step.shape)) {
      return choice.items;
    }
  }
  return 0;
}

void StepPlanner::remember_choice(const Known& known) {
  std::erase_if(choices_, [&](const Choice& old) {
    return old.is_training == known.is_training && old.batch == known.batch && old.shape == known.shape;
  });
  choices_.push_back({known.shape, known.is_training, known.batch, known.plan.choice.items});
}

std::string StepPlanner::choices() const {
  Json all = Json::array();
  for (const Choice& choice : choices_) {
    Json tensors = Json::array();
    for (const auto& [type, sizes] : choice.shape.tensors) {
      tensors.push_back({static_cast<int>(type), sizes});
    }
    all.push_back(
        {{"training", choice.is_training}, {"batch", choice.batch}, {"items", choice.items}, {"tensors", tensors}});
  }
  return all.dump();
}

std::vector<StepPlanner::Choice> StepPlanner::parse_choices(const std::string& text) {
  std::vector<Choice> choices;
  try {
    for (const Json& one : Json::parse(text)) {
      Choice choice{.shape = {},
                    .is_training = one.at("training").get<bool>(),
                    .batch = one.at("batch").get<int64_t>(),
                    .items = one.at("items").get<int64_t>()};
      for (const Json& tensor : one.at("tensors")) {
        choice.shape.tensors.emplace_back(static_cast<at::ScalarType>(tensor.at(0).get<int>()),
                                          tensor.at(1).get<std::vector<int64_t>>());
      }
      if (choice.items < 1 || choice.items > choice.batch) {
        throw CorruptFile(fmt::format("Stepper.load_state_dict: a micro-batch of {} items of {} cannot be",
                                      choice.items, choice.batch));
      }
      choices.push_back(std::move(choice));
    }
  } catch (const Json::exception& error) {
    throw CorruptFile(fmt::format("Stepper.load_state_dict: micro_batches is not as saved: {}", error.what()));
  }
  return choices;
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
  last_->left_free += more;
  last_->is_stale = true;
  return true;
}

void StepPlanner::forget() {
  if (last_ != nullptr) {
    known_.remove_if([&](const Known& known) { return &known == last_; });
    last_ = nullptr;
  }
}

namespace {

// How many numbers of a parameter's type torch's optimizers keep for each of its elements.
int64_t numbers_kept(const torch::optim::OptimizerOptions& options) {
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options)) {
    return adam->amsgrad() ? 3 : 2;
  }
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) {
    return adamw->amsgrad() ? 3 : 2;
  }
  if (const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropOptions*>(&options)) {
    return 1 + (rmsprop->momentum() > 0 ? 1 : 0) + (rmsprop->centered() ? 1 : 0);
  }
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    return sgd->momentum() != 0 ? 1 : 0;
  }
  return 0;
}

}  // namespace

int64_t workspace_bytes(const torch::optim::Optimizer& optimizer) {
  int64_t largest = 0;
  if (dynamic_cast<const StatefulOptimizer*>(&optimizer) == nullptr) {
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        largest = std::max(largest, static_cast<int64_t>(parameter.nbytes()));
      }
    }
  }
  return 3 * largest;
}

int64_t state_bytes_to_come(const torch::optim::Optimizer& optimizer) {
  if (const auto* stateful = dynamic_cast<const StatefulOptimizer*>(&optimizer)) {
    return stateful->state_bytes_to_come();
  }
  int64_t bytes = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.requires_grad() && optimizer.state().count(parameter.unsafeGetTensorImpl()) == 0) {
        bytes += numbers_kept(group.options()) * static_cast<int64_t>(parameter.nbytes());
      }
    }
  }
  return bytes;
}

}  // namespace snug::detail
