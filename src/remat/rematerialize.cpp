#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core.h"
#include "snug/plan.h"
#include "snug/state.h"
#include "src/core/parse_json.h"
#include "src/planner/bound.h"
#include "src/remat/activation_plan.h"
#include "src/remat/op_tape.h"
#include "src/remat/profile_step.h"
#include "src/remat/recorded_step.h"
#include "src/remat/same_losses.h"
#include "src/remat/tape_recorder.h"
#include "src/remat/tape_schedule.h"

// How a plan is verified
//
// Problem: a plan is a prediction from a profile. A model may compute other bits when an operator runs again, and
// memory may rise for reasons that no event of the profile shows.
//
// Options: trust the profile, and fail in training; or try the plan first. A trial costs one step.
//
// Choice: plan_activations runs the plan once, with an EffectJournal that takes the step's effects back. The trial
// compares rebuilt bits and the peak with the prediction. Storages with other bits become Pinned. Unexplained bytes are
// added to the profile. If the bits are right and the measured peak is within the budget, the plan is accepted.
// Otherwise the next plan is made and tried.
//
// Consequences:
// - After kVerifications further plans, the function throws.
// - A refused budget is checked too: the smallest budget found is tried before BudgetExceeded names the budget.

namespace snug {
namespace {

using detail::OpTape;

constexpr int kVerifications = 5;

// Adds bytes of unknown time: so the bytes are alive during the whole step. All other events come one later.
void add_unexplained(plan::Profile& profile, plan::Solution& plan, int64_t bytes) {
  profile.events.insert(profile.events.begin(), {plan::EventKind::Allocate, 0, bytes});
  profile.events.push_back({plan::EventKind::Release, 0, bytes});
  for (plan::Stay& stay : plan.stays) {
    stay.event += stay.event > 0 ? 1 : 0;
  }
  plan.peak_bytes += bytes;
  plan.plain_peak_bytes += bytes;
}

struct PlanTrial {
  std::set<int> different = {};  // storages with other bits after a rebuild
  int64_t peak_bytes = 0;        // as measured
};

PlanTrial try_step(const ActivationPlan& plan, const std::function<at::Tensor()>& forward_and_loss,
                   detail::EffectJournal& journal) {
  detail::TapeRecorder recorder(detail::device_of(detail::profile_of(plan)));
  const auto tape = std::make_shared<OpTape>(detail::PlanContent::of(plan).schedule(), &recorder);
  tape->verify_values();
  detail::record_step(forward_and_loss, tape, recorder, journal);
  return {tape->different(), recorder.peak_bytes()};
}

}  // namespace

// --- content

namespace detail {

PlanContent::PlanContent(plan::Simulator simulator, plan::Solution solution)
    : simulator_(std::move(simulator)), solution_(std::move(solution)) {
  const int impossible = simulator_.run(solution_.stays).impossible;
  if (impossible >= 0) {
    throw ConfigError(
        fmt::format("ActivationPlan: the plan drops storage {}, which cannot be rebuilt; plan again", impossible));
  }
}

ActivationPlan PlanContent::make_plan(plan::Simulator simulator, plan::Solution solution) {
  return ActivationPlan(std::make_shared<const PlanContent>(std::move(simulator), std::move(solution)));
}

std::shared_ptr<const TapeSchedule> PlanContent::schedule() const {
  const std::lock_guard lock(mutex_);
  if (!schedule_) {
    schedule_ = std::make_shared<const TapeSchedule>(
        make_schedule(simulator_.profile(), solution_.stays, simulator_.run(solution_.stays)));
  }
  return schedule_;
}

double PlanContent::seconds() const {
  const plan::Profile& profile = simulator_.profile();
  return solution_.seconds > solution_.plain_seconds
             ? solution_.seconds
             : profile.step_seconds(profile.operator_seconds(), /*has_tape=*/true);
}

SaveOnHost::Report PlanContent::offloaded() const {
  const std::lock_guard lock(mutex_);
  return schedule_ && schedule_->store ? schedule_->store->report() : SaveOnHost::Report{};
}

ActivationPlan unverified_plan(const plan::Profile& profile, Bytes budget, plan::SolverOptions options) {
  plan::Simulator simulator(profile);
  plan::Solver solver(simulator, options);
  plan::Answer answer = solver.solve(budget.count());
  if (std::holds_alternative<plan::Infeasible>(answer)) {
    const plan::Solution smallest = solver.smallest();  // the search for a fast plan may miss the smallest plan
    const Bytes bytes(smallest.peak_bytes);
    if (bytes > budget) {
      const Bytes bound(plan::lower_bound_bytes(simulator));
      throw BudgetExceeded(
          fmt::format("plan_activations: no plan was found that runs the step within {}; the smallest that was found "
                      "takes {} ({} bytes), {}; {}",
                      budget.str(), bytes.str(), bytes.count(),
                      bytes == bound
                          ? "and no plan takes less"
                          : fmt::format("and no plan takes less than {} ({} bytes)", bound.str(), bound.count()),
                      plan::sentence(simulator.at_peak(smallest.stays))),
          bytes);
    }
    answer = solver.solve(budget.count());
  }
  return PlanContent::make_plan(std::move(simulator), std::get<plan::Solution>(std::move(answer)));
}

}  // namespace detail

// --- plan

ActivationPlan::ActivationPlan(std::shared_ptr<const detail::PlanContent> content)
    : predicted_peak_bytes(content->solution().peak_bytes),
      predicted_seconds(content->seconds()),
      plain_peak_bytes(content->solution().plain_peak_bytes),
      plain_seconds(content->solution().plain_seconds),
      content_(std::move(content)) {}

std::string ActivationPlan::explain() const { return plan::explain(content_->simulator(), content_->solution()); }

SaveOnHost::Report ActivationPlan::offloaded() const { return content_->offloaded(); }

std::string ActivationPlan::to_json() const {
  return nlohmann::ordered_json{{"plan", nlohmann::ordered_json::parse(content_->solution().to_json())},
                                {"profile", nlohmann::ordered_json::parse(content_->simulator().profile().to_json())}}
      .dump();
}

ActivationPlan ActivationPlan::from_json(std::string_view text) {
  const auto json = detail::parse_json<nlohmann::ordered_json>(text, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("plan") || !json.contains("profile")) {
    throw ConfigError("ActivationPlan.from_json: this is no plan with its profile, as to_json writes it");
  }
  plan::Solution solution = plan::Solution::from_json(json["plan"].dump());
  plan::Simulator simulator(plan::Profile::from_json(json["profile"].dump()));
  if (solution.stays.size() != simulator.profile().storages.size()) {
    throw ConfigError("ActivationPlan.from_json: the plan and the profile do not belong together");
  }
  return detail::PlanContent::make_plan(std::move(simulator), std::move(solution));
}

ActivationPlan plan_activations(const std::function<at::Tensor()>& forward_and_loss, Bytes budget, OffloadLink link) {
  detail::SameLosses losses("plan_activations");
  const auto forward = losses.of(forward_and_loss);
  return detail::plan_activations(detail::profile_step(forward, {.memory = budget, .link = std::move(link)}), forward,
                                  budget);
}

ActivationPlan detail::plan_activations(plan::Profile profile, const std::function<at::Tensor()>& forward_and_loss,
                                        Bytes budget, std::optional<plan::Solution> found) {
  EffectJournal journal;
  journal.begin();
  return plan_activations(std::move(profile), forward_and_loss, budget, std::move(found), journal);
}

ActivationPlan detail::plan_activations(plan::Profile profile, const std::function<at::Tensor()>& forward_and_loss,
                                        Bytes budget, std::optional<plan::Solution> found, EffectJournal& journal) {
  at::autocast::clear_cache();  // what passes before have cast is no part of the step
  for (int k = 0;; ++k) {
    std::exception_ptr refusal;  // the budget was refused; the smallest budget that the error names is tried instead
    const auto plan_now = [&] {
      if (found) {
        return PlanContent::make_plan(plan::Simulator(profile), *std::exchange(found, {}));
      }
      try {
        return unverified_plan(profile, budget);
      } catch (const BudgetExceeded& error) {
        refusal = std::current_exception();
        return unverified_plan(profile, error.smallest_feasible());
      }
    };
    const ActivationPlan plan = plan_now();
    PlanTrial trial;
    try {
      trial = try_step(plan, forward_and_loss, journal);
    } catch (const std::exception& error) {
      if (refusal && is_out_of_memory(error)) {  // a MemoryLimit in force stopped the trial
        std::rethrow_exception(refusal);
      }
      throw;
    }
    const int64_t more = trial.peak_bytes - plan.predicted_peak_bytes;
    if (trial.different.empty() && more <= 0) {
      if (refusal) {
        std::rethrow_exception(refusal);
      }
      return plan;
    }
    if (trial.different.empty()) {
      plan::Solution solution = solution_of(plan);
      add_unexplained(profile, solution, more);
      if (trial.peak_bytes <= budget.count()) {
        return PlanContent::make_plan(plan::Simulator(std::move(profile)), std::move(solution));
      }
    }
    if (k == kVerifications && refusal) {
      std::rethrow_exception(refusal);
    }
    if (k == kVerifications && trial.different.empty()) {
      throw BudgetExceeded(
          fmt::format("plan_activations: under plan after plan memory rises higher than predicted, to {} ({} bytes) "
                      "instead of {} at last; it cannot be planned within {}",
                      Bytes(trial.peak_bytes).str(), trial.peak_bytes, plan.predicted_peak_bytes, budget.str()));
    }
    if (k == kVerifications) {
      throw Error(
          "plan_activations: the model computes other values each time that an operator runs again; it cannot be "
          "rematerialized");
    }
    for (const int storage : trial.different) {
      profile.storages[static_cast<size_t>(storage)].kind = plan::StorageKind::Pinned;
    }
  }
}

// --- scope

class Rematerialize::Impl {
 public:
  explicit Impl(std::shared_ptr<const detail::TapeSchedule> schedule)
      : tape(std::make_shared<OpTape>(std::move(schedule))), saved(tape), operators(*tape) {
    detail::add_evictable(tape);
  }

  std::shared_ptr<OpTape> tape;
  std::optional<detail::PolicyScope> saved;
  std::optional<detail::OperatorScope> operators;
};

Rematerialize::Rematerialize(ActivationPlan plan)
    : impl_(std::make_unique<Impl>(detail::PlanContent::of(plan).schedule())) {}

Rematerialize::~Rematerialize() {
  impl_->operators.reset();
  impl_->saved.reset();
  impl_->tape->close();
}

std::string Rematerialize::deviation() const {
  return follows_plan() ? impl_->tape->growth() : impl_->tape->deviation();
}
bool Rematerialize::follows_plan() const {
  impl_->operators->tell_if_switched_off();
  return impl_->tape->deviation().empty();
}
std::shared_ptr<const std::atomic<int64_t>> Rematerialize::replayed_operators() const {
  return impl_->tape->replayed();
}

}  // namespace snug
