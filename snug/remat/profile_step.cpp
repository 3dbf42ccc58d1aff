#include "snug/remat/profile_step.h"

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "snug/core/out_of_memory.h"
#include "snug/core/rng.h"
#include "snug/memory/detail/device.h"
#include "snug/planner/simulator.h"
#include "snug/planner/solver.h"
#include "snug/remat/detail/op_tape.h"
#include "snug/remat/detail/recorded_step.h"
#include "snug/remat/detail/tape_recorder.h"
#include "snug/remat/detail/tape_schedule.h"

// A profile says when each storage dies if nothing saved holds it, so it can be taken under any plan: what a plan keeps
// and rebuilds is left out. Plainly is fastest. Where plain training does not fit, a plan is needed before there is a
// profile. So a forward pass alone, which keeps next to nothing, tells the operators and what autograd saves; backward
// asks for that in about the reverse order, node by node.

namespace snug {
namespace {

using detail::OpTape;
using Schedule = std::shared_ptr<const detail::TapeSchedule>;

constexpr size_t kMostRuns = 3, kLeastRuns = 2;  // the first one is cold
constexpr size_t kOperatorsToTime = 10'000;      // of all runs together: so many have many alike, whose median is taken

StepProfile profile_once(const std::function<at::Tensor()>& forward_and_loss, c10::Device device,
                         const Schedule& schedule, Bytes memory, detail::InitialisedParameters& parameters) {
  const RngGuard generators;
  detail::TapeRecorder recorder(device);
  detail::record_step(forward_and_loss, std::make_shared<OpTape>(schedule, &recorder), recorder,
                      {.memory = memory, .parameters = &parameters});
  return recorder.take();
}

// The least of each operator's times over a few runs of the same step.
void take_least_times(StepProfile& profile, const StepProfile& other) {
  if (profile.operators.size() != other.operators.size() || profile.backward.size() != other.backward.size()) {
    return;
  }
  const auto take = [](auto& ones, const auto& others) {
    for (size_t i = 0; i < ones.size(); ++i) {
      ones[i].seconds = std::min(ones[i].seconds, others[i].seconds);
    }
  };
  take(profile.operators, other.operators);
  take(profile.backward, other.backward);
}

// Operators of one name on operands of the same sizes take the same time, so that what else the machine did at one of
// them does not make it look dear: all get the median.
void level_times(StepProfile& profile) {
  std::map<std::pair<std::string, std::vector<int64_t>>, std::vector<ProfiledOperator*>> alike;
  for (ProfiledOperator& op : profile.operators) {
    std::vector<int64_t> sizes = {std::ssize(op.reads)};
    for (const auto* values : {&op.reads, &op.writes}) {
      for (const ValueId& value : *values) {
        sizes.push_back(profile.storages[static_cast<size_t>(value.storage)].bytes);
      }
    }
    alike[{op.name, std::move(sizes)}].push_back(&op);
  }
  for (auto& [signature, operators] : alike) {
    const auto middle = operators.begin() + std::ssize(operators) / 2;
    std::nth_element(operators.begin(), middle, operators.end(),
                     [](const auto* a, const auto* b) { return a->seconds < b->seconds; });
    const double median = (*middle)->seconds;
    for (ProfiledOperator* op : operators) {
      op->seconds = median;
    }
  }
}

// --- what does not fit plainly

// What was packed between the same two operators is asked for together, by one node, with a gradient that comes in and
// one that goes out.
void add_guessed_backward(StepProfile& profile, const std::vector<std::pair<int, size_t>>& packed) {
  for (auto last = packed.rbegin(); last != packed.rend();) {
    const auto first = std::find_if(last, packed.rend(), [&](const auto& one) { return one.second != last->second; });
    int64_t largest = 0;
    for (auto one = last; one != first; ++one) {
      profile.events.push_back({EventKind::Unpack, one->first});
      largest = std::max(largest, profile.storages[static_cast<size_t>(one->first)].bytes);
    }
    profile.events.push_back({EventKind::Allocate, 0, 2 * largest});
    profile.events.push_back({EventKind::Release, 0, 2 * largest});
    for (auto one = last; one != first; ++one) {
      profile.events.push_back({EventKind::Done, one->first});
    }
    last = first;
  }
}

// Schedules to profile under, each more frugal than the one before: what the backward pass itself takes is not known
// yet.
class FrugalSchedules {
 public:
  FrugalSchedules(const std::function<at::Tensor()>& forward_and_loss, c10::Device device, const OffloadLink& link)
      : store_(link.is_open() ? detail::make_offload_store(link) : nullptr),
        simulator_(guess(forward_and_loss, device, link, store_)),
        solver_(simulator_, kSearch),
        smallest_(about_the_smallest_peak(solver_)) {}

  /// nullptr: there is no other. The last one is the same in every run, whatever the times were that were measured.
  Schedule next() {
    constexpr std::array<int64_t, 3> kQuarters = {8, 5, 4};  // of the smallest peak; what takes more runs faster
    if (tried_ > kQuarters.size()) {
      return nullptr;
    }
    const size_t k = tried_++;
    const RematPlan plan = k == kQuarters.size()
                               ? solver_.smallest()
                               : std::get<RematPlan>(solver_.solve(smallest_ / 4 * kQuarters[k] + smallest_ % 4));
    auto schedule = detail::make_schedule(simulator_.profile(), plan.stays, simulator_.run(plan.stays), store_);
    schedule.is_guess = true;
    return std::make_shared<const detail::TapeSchedule>(std::move(schedule));
  }

 private:
  static constexpr SolverOptions kSearch{.work = 2'000'000};

  // PlanSolver::smallest searches longer. This is a guess's.
  static int64_t about_the_smallest_peak(PlanSolver& solver) {
    const PlanAnswer answer = solver.solve(0);
    const auto* no_plan = std::get_if<Infeasible>(&answer);
    return no_plan != nullptr ? no_plan->smallest_feasible_bytes : 0;
  }

  static StepProfile guess(const std::function<at::Tensor()>& forward_and_loss, c10::Device device,
                           const OffloadLink& link, const std::shared_ptr<detail::OffloadStore>& store) {
    const RngGuard generators;
    detail::TapeRecorder recorder(device);
    const auto tape = std::make_shared<OpTape>(nullptr, &recorder);
    tape->drop_everything(store);
    detail::record_step(forward_and_loss, tape, recorder, {.goes_backward = false});
    auto packed = recorder.packed();
    std::erase_if(packed, [&](const auto& one) { return tape->is_asked_inside(one.first); });
    StepProfile profile = recorder.take();
    std::erase_if(profile.events, [&](const ProfileEvent& event) {
      return event.kind == EventKind::Drop && tape->is_asked_inside(event.index);  // it stays
    });
    add_guessed_backward(profile, packed);
    profile.link = link;
    profile.device = device.str();
    return profile;
  }

  std::shared_ptr<detail::OffloadStore> store_;  // null: nothing may be offloaded
  StepSimulator simulator_;
  PlanSolver solver_;
  int64_t smallest_;
  size_t tried_ = 0;
};

// In a handler. What a backward pass inside the forward pass asks for cannot always be made again there: a parameter or
// buffer may have been written meanwhile. Then there is no other way than the one that did not fit.
void emplace_or_rethrow(std::optional<FrugalSchedules>& frugal, const std::function<at::Tensor()>& forward_and_loss,
                        c10::Device device, const OffloadLink& link) {
  const std::exception_ptr what_happened = std::current_exception();
  try {
    frugal.emplace(forward_and_loss, device, link);
  } catch (const detail::CannotRebuild&) {
    std::rethrow_exception(what_happened);
  }
}

StepProfile profile_on(c10::Device device, const std::function<at::Tensor()>& forward_and_loss,
                       const ProfileOptions& options, detail::InitialisedParameters& parameters) {
  detail::take_workspaces(device);
  std::optional<StepProfile> profile;
  std::optional<FrugalSchedules> frugal;
  Schedule schedule;  // none: plainly
  const auto is_enough = [&](size_t runs) {
    return runs == kMostRuns || (runs >= kLeastRuns && runs * profile->operators.size() >= kOperatorsToTime);
  };
  for (size_t runs = 0; !is_enough(runs);) {
    try {
      StepProfile one =
          profile_once(forward_and_loss, device, schedule, schedule ? Bytes::unlimited() : options.memory, parameters);
      if (profile) {
        take_least_times(one, *profile);
      }
      profile = std::move(one);
      ++runs;
    } catch (const std::exception& error) {
      if (!is_out_of_memory(error)) {
        throw;
      }
      if (!frugal) {
        emplace_or_rethrow(frugal, forward_and_loss, device, options.link);
      }
      schedule = frugal->next();
      if (schedule == nullptr) {
        throw;
      }
    }
  }
  level_times(*profile);
  profile->device = device.str();
  return std::move(*profile);
}

}  // namespace

StepProfile profile_step(const std::function<at::Tensor()>& forward_and_loss, ProfileOptions options) {
  detail::InitialisedParameters parameters;
  StepProfile profile = detail::on_device_of_loss(
      [&](c10::Device device) { return profile_on(device, forward_and_loss, options, parameters); });
  profile.link = std::move(options.link);
  profile.check();
  return profile;
}

}  // namespace snug
