#include "src/remat/profile_step.h"

#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/autocast_mode.h>

#include "snug/memory.h"
#include "snug/plan.h"
#include "snug/state.h"
#include "src/memory/device.h"
#include "src/planner/extrapolate.h"
#include "src/planner/solver.h"
#include "src/remat/activation_plan.h"
#include "src/remat/op_tape.h"
#include "src/remat/recorded_step.h"
#include "src/remat/tape_recorder.h"
#include "src/remat/tape_schedule.h"

// How a step is profiled, even if plain training does not fit
//
// Problem: a plan needs a profile of the whole step, and plain training may not fit into memory. Without plain
// training, no run has shown the requests of backward, and the bytes that backward itself takes.
//
// Choice: a profile says when each storage dies if nothing saved holds the storage. So a profile can be taken under any
// plan: results that the plan keeps and rebuilds are left out.
//
// 1. Run plainly, which is fastest.
// 2. If plain training does not fit, run a forward pass alone, which keeps next to nothing. The pass shows the
//    operators and the saved tensors. Guess that backward asks for the saved tensors in about the reverse order, node
//    by node.
// 3. Run under frugal plans for the guess, each more frugal than the plan before, until a run fits.
// 4. If the most frugal plan fails too, the failed run has shown what backward takes up to the failure. Plan again, as
//    frugally as possible, with the new facts.
//
// A caller with a plan for the expected profile has the first run made under the plan instead (ProfileOptions::plan).
//
// Consequence: the successful schedule follows from bytes alone, whatever the times were. If some plan can run the
// step, the step can be profiled.
//
// A hook of the backward pass may write a buffer that forward has read. An operator that read the buffer would have
// other results in a replay. So the operators that read memory written in backward are not replayable, and a run that
// failed because of the write is made again.

namespace snug {
namespace {

using detail::OpTape;
using detail::ProfiledStep;
using Schedule = std::shared_ptr<const detail::TapeSchedule>;

// The profiled step, over all runs.
struct ToProfile {
  const std::function<at::Tensor()>& forward_and_loss;
  const detail::ProfileOptions& options;
  detail::EffectJournal& journal;
  detail::TrialOptions trial;
  detail::InitialisedParameters parameters = {};
  std::set<int> written_in_backward = {};  // storages from before the step
  // Records of the latest run, if the run's backward pass ran out of memory.
  std::optional<detail::TapeRecorder::Unfinished> unfinished = {};
  std::vector<std::pair<int, size_t>> packed = {};
};

void forbid_replays_of_readers(plan::Profile& profile, const std::set<int>& storages) {
  for (plan::Operator& op : profile.operators) {
    op.replayable = op.replayable && std::none_of(op.reads.begin(), op.reads.end(), [&](const plan::Value& value) {
                      return storages.contains(value.storage);
                    });
  }
}

bool is_from_before(const plan::Event& event) {
  return event.kind == plan::EventKind::Release && event.index == detail::TapeRecorder::kFromBefore;
}

// If the run has kept as many bytes as the run let go of, each step will do so.
ProfiledStep with_kept_results(plan::Profile profile, int64_t let_go, int64_t kept, bool counts_kept) {
  if (let_go == 0 || let_go > kept || !counts_kept) {
    std::erase_if(profile.events, is_from_before);
    return {std::move(profile)};
  }
  for (plan::Event& event : profile.events) {
    event.index = is_from_before(event) ? 0 : event.index;
  }
  profile.events.insert(profile.events.begin(), {plan::EventKind::Allocate, 0, let_go});
  return {std::move(profile), let_go};
}

ProfiledStep profile_once(ToProfile& step, c10::Device device, const Schedule& schedule) {
  const auto taken = [&] { return live_bytes(device).count() - step.journal.bytes(); };
  const int64_t before = taken();
  detail::TapeRecorder recorder(device);
  const auto tape = std::make_shared<OpTape>(schedule, &recorder);
  if (step.options.plan != nullptr) {
    tape->verify_values();
  }
  step.unfinished.reset();
  const auto note_writes = [&] {
    step.written_in_backward.insert(tape->written_in_backward().begin(), tape->written_in_backward().end());
  };
  try {
    detail::record_step(
        step.forward_and_loss, tape, recorder, step.journal,
        {.memory = schedule ? Bytes::unlimited() : step.options.memory, .parameters = &step.parameters});
  } catch (...) {
    step.unfinished = recorder.take_unfinished();
    step.packed = recorder.packed();
    std::erase_if(step.packed, [&](const auto& one) { return tape->is_asked_inside(one.first); });
    note_writes();
    throw;
  }
  note_writes();
  const int64_t let_go = recorder.let_go_bytes(), peak = recorder.peak_bytes();
  plan::Profile profile = recorder.take();
  forbid_replays_of_readers(profile, step.written_in_backward);
  for (const int storage : tape->different()) {
    profile.storages[static_cast<size_t>(storage)].kind = plan::StorageKind::Pinned;
  }
  const int64_t kept = taken() - before + let_go;
  ProfiledStep found = with_kept_results(std::move(profile), let_go, kept, step.trial.counts_kept);
  if (step.options.plan != nullptr) {  // hashes of a verification lie between the operators
    found.profile.host_seconds = detail::profile_of(*step.options.plan).host_seconds;
    found.profile.tape_seconds = detail::profile_of(*step.options.plan).tape_seconds;
  }
  found.is_steady = let_go == kept || !step.trial.counts_kept;
  found.follows_plan =
      step.options.plan != nullptr && tape->deviation().empty() && tape->growth().empty() && tape->different().empty();
  found.peak_bytes = peak;
  return found;
}

// Gives all operators of one name, on operands of the same sizes, the median of their times. Such operators take the
// same time, and other work of the machine during one operator must not make the operator look dear.
void level_times(plan::Profile& profile) {
  std::map<std::pair<std::string, std::vector<int64_t>>, std::vector<plan::Operator*>> alike;
  for (plan::Operator& op : profile.operators) {
    std::vector<int64_t> sizes = {std::ssize(op.reads)};
    for (const auto* values : {&op.reads, &op.writes}) {
      for (const plan::Value& value : *values) {
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
    for (plan::Operator* op : operators) {
      op->seconds = median;
    }
  }
}

// --- steps that do not fit plainly

// Tensors packed between the same two operators are asked for together: first the operands of the operator after the
// tensors, then the results of the operator before, both in the order of packing, as one node asks. The nodes have one
// gradient that comes in and one gradient that goes out.
void add_guessed_backward(plan::Profile& profile, std::vector<std::pair<int, size_t>> packed) {
  const auto is_operand = [&](const std::pair<int, size_t>& one) {
    return one.second == 0 ||
           std::ranges::none_of(profile.operators[one.second - 1].writes,
                                [&](const plan::Value& value) { return value.storage == one.first; });
  };
  for (auto last = packed.end(); last != packed.begin();) {
    const auto first =
        std::ranges::lower_bound(packed.begin(), last, std::prev(last)->second, {}, &std::pair<int, size_t>::second);
    std::stable_partition(first, last, is_operand);
    int64_t largest = 0;
    for (auto one = first; one != last; ++one) {
      profile.events.push_back({plan::EventKind::Unpack, one->first});
      largest = std::max(largest, profile.storages[static_cast<size_t>(one->first)].bytes);
    }
    profile.events.push_back({plan::EventKind::Allocate, 0, 2 * largest});
    profile.events.push_back({plan::EventKind::Release, 0, 2 * largest});
    for (auto one = first; one != last; ++one) {
      profile.events.push_back({plan::EventKind::Done, one->first});
    }
    last = first;
  }
}

// Adds the rest of a backward pass that has begun. The bytes that the rest itself takes are not known, so no bytes are
// guessed.
void add_rest_of_backward(plan::Profile& profile, const std::vector<std::pair<int, size_t>>& packed) {
  std::map<int, int> asked, open;
  for (const plan::Event& event : profile.events) {
    if (event.kind == plan::EventKind::Unpack) {
      ++asked[event.index];
      ++open[event.index];
    } else if (event.kind == plan::EventKind::Done) {
      --open[event.index];
    }
  }
  for (const auto& [storage, count] : open) {
    profile.events.insert(profile.events.end(), static_cast<size_t>(std::max(0, count)),
                          {plan::EventKind::Done, storage});
  }
  for (auto last = packed.rbegin(); last != packed.rend(); ++last) {
    if (asked[last->first]-- <= 0) {
      profile.events.push_back({plan::EventKind::Unpack, last->first});
      profile.events.push_back({plan::EventKind::Done, last->first});
    }
  }
}

// Schedules for steps 3 and 4 above, each schedule more frugal than the one before.
class FrugalSchedules {
 public:
  FrugalSchedules(ToProfile& step, c10::Device device)
      : known_writes_(step.written_in_backward.size()),
        store_(step.options.link.is_open() ? detail::make_offload_store(step.options.link) : nullptr),
        simulator_(guess(step, device, store_)),
        solver_(simulator_, kQuickSearch),
        smallest_(about_the_smallest_peak(solver_)) {}

  /// Whether a run has shown writes in backward that the guess did not know.
  bool is_outdated(const ToProfile& step) const { return step.written_in_backward.size() > known_writes_; }

  /// nullptr: no schedule is left.
  Schedule next(ToProfile& step) {
    constexpr std::array<int64_t, 3> kQuarters = {8, 5, 4};  // of the smallest peak; a plan with more bytes runs faster
    const size_t k = tried_++;
    if (k > kQuarters.size()) {
      return step.trial.persists && k < kMostTries ? next_after_failure(step) : nullptr;
    }
    return schedule_of(simulator_,
                       k == kQuarters.size()
                           ? smallest(step)
                           : std::get<plan::Solution>(solver_.solve(smallest_ / 4 * kQuarters[k] + smallest_ % 4)));
  }

 private:
  static constexpr size_t kMostTries = 24;

  // The last guess. If a smaller micro-batch may be tried instead, the quick search is enough.
  plan::Solution smallest(const ToProfile& step) {
    return step.trial.persists ? plan::Solver(simulator_, kSearch).smallest() : solver_.smallest();
  }

  Schedule schedule_of(const plan::Simulator& simulator, const plan::Solution& plan) const {
    auto schedule = detail::make_schedule(simulator.profile(), plan.stays, simulator.run(plan.stays), store_);
    schedule.is_guess = true;
    return std::make_shared<const detail::TapeSchedule>(std::move(schedule));
  }

  Schedule next_after_failure(ToProfile& step) const {
    if (!step.unfinished) {
      return nullptr;
    }
    plan::Profile profile = std::move(step.unfinished->profile);
    std::erase_if(profile.events, is_from_before);
    forbid_replays_of_readers(profile, step.written_in_backward);
    add_rest_of_backward(profile, step.packed);
    profile.link = step.options.link;
    profile.device = simulator_.profile().device;
    const plan::Simulator simulator(std::move(profile));
    const plan::Solution plan = plan::Solver(simulator, kSearch).smallest();
    return plan.peak_bytes < step.unfinished->demand_bytes ? schedule_of(simulator, plan) : nullptr;
  }

  // A schedule for a profile has to fit, and need not be fast. Plans of segments fit, and a quick search finds them.
  static constexpr plan::SolverOptions kQuickSearch{.work = 30'000};
  static constexpr plan::SolverOptions kSearch{.work = 2'000'000};

  // A guess at plan::Solver::smallest(), which searches longer.
  static int64_t about_the_smallest_peak(plan::Solver& solver) {
    const plan::Answer answer = solver.solve(0);
    const auto* no_plan = std::get_if<plan::Infeasible>(&answer);
    return no_plan != nullptr ? no_plan->smallest_feasible_bytes : 0;
  }

  static plan::Profile guess(ToProfile& step, c10::Device device, const std::shared_ptr<detail::OffloadStore>& store) {
    detail::TapeRecorder recorder(device);
    const auto tape = std::make_shared<OpTape>(nullptr, &recorder);
    tape->drop_everything(store);
    detail::record_step(step.forward_and_loss, tape, recorder, step.journal, {.goes_backward = false});
    auto packed = recorder.packed();
    std::erase_if(packed, [&](const auto& one) { return tape->is_asked_inside(one.first); });
    plan::Profile profile = recorder.take();
    std::erase_if(profile.events, [&](const plan::Event& event) {
      return is_from_before(event) ||
             (event.kind == plan::EventKind::Drop && tape->is_asked_inside(event.index));  // the storage stays
    });
    forbid_replays_of_readers(profile, step.written_in_backward);
    add_guessed_backward(profile, packed);
    profile.link = step.options.link;
    profile.device = device.str();
    return profile;
  }

  size_t known_writes_;                          // in backward
  std::shared_ptr<detail::OffloadStore> store_;  // null: nothing may be offloaded
  plan::Simulator simulator_;
  plan::Solver solver_;
  int64_t smallest_;
  size_t tried_ = 0;
};

// Must be called in an exception handler. Results that a backward pass inside the forward pass asks for cannot always
// be made again inside the forward pass: a parameter or buffer may have been written since. Then plain training is the
// only method left, and the error of plain training is thrown again.
void emplace_or_rethrow(std::optional<FrugalSchedules>& frugal, ToProfile& step, c10::Device device) {
  const std::exception_ptr what_happened = std::current_exception();
  try {
    frugal.emplace(step, device);
  } catch (const detail::CannotRebuild&) {
    std::rethrow_exception(what_happened);
  }
}

ProfiledStep profile_on(c10::Device device, ToProfile& step) {
  detail::take_workspaces(device);
  std::optional<ProfiledStep> found;
  std::optional<FrugalSchedules> frugal;
  // Null: plain training.
  Schedule schedule = step.options.plan != nullptr ? detail::PlanContent::of(*step.options.plan).schedule() : nullptr;
  if (schedule == nullptr && !step.options.may_fit_plainly) {
    try {
      frugal.emplace(step, device);
      schedule = frugal->next(step);
    } catch (const detail::CannotRebuild&) {  // plain training is the only method
    }
  }
  const auto is_enough = [&](size_t runs) {
    constexpr size_t kToBeSteady = 2;
    return runs >= std::max(step.options.runs, found && found->is_steady ? 0 : kToBeSteady);
  };
  for (size_t runs = 0; !is_enough(runs);) {
    try {
      ProfiledStep one = profile_once(step, device, schedule);
      if (found) {
        plan::take_least_times(one.profile, found->profile);
      }
      found = std::move(one);
      ++runs;
    } catch (const std::exception& error) {
      const bool is_outdated = frugal && frugal->is_outdated(step);
      const bool cannot_rebuild = dynamic_cast<const detail::CannotRebuild*>(&error) != nullptr;
      if (step.options.only_so || (!is_out_of_memory(error) && !(cannot_rebuild && is_outdated))) {
        throw;
      }
      if (!frugal || is_outdated) {
        emplace_or_rethrow(frugal, step, device);
      }
      schedule = frugal->next(step);
      if (schedule == nullptr) {
        throw;
      }
    }
  }
  level_times(found->profile);
  found->profile.device = device.str();
  return std::move(*found);
}

}  // namespace

ProfiledStep detail::profile_step(const std::function<at::Tensor()>& forward_and_loss,
                                  const detail::ProfileOptions& options, EffectJournal& journal, TrialOptions trial) {
  at::autocast::clear_cache();  // what passes before have cast is no part of the step
  ToProfile step{forward_and_loss, options, journal, trial};
  ProfiledStep found = on_device_of_loss([&](c10::Device device) { return profile_on(device, step); });
  found.profile.link = options.link;
  found.profile.check();
  return found;
}

plan::Profile detail::profile_step(const std::function<at::Tensor()>& forward_and_loss,
                                   detail::ProfileOptions options) {
  EffectJournal journal;
  journal.begin();
  return detail::profile_step(forward_and_loss, options, journal, {}).profile;
}

}  // namespace snug
