#pragma once
// For tools that plan themselves: programs need stepper.h or plan.h alone.
//
// The planner decides what a step keeps, rebuilds and offloads, so that the step's memory stays within a number of
// bytes.
//
// Stay and Stays: a plan as data. A Stay says what the plan does with a storage; a plan has a Stay for each storage of
// a profile.
//
// StepSimulator: time, memory and replays of a forward and backward pass under a plan. Nothing runs. The executor of a
// plan follows the rules at the top of simulator.cpp; simulator and executor find replays with planner/replay.h.
//
//   snug::plan::StepSimulator simulator(profile);
//   snug::plan::Simulation result = simulator.run(snug::plan::keep_all(profile));  // result.peak_bytes, result.seconds
//
// RematPlan: the storages that stay, are rebuilt or are offloaded in a training step, with the cost in bytes and
// seconds. explain() describes the plan to people.
//
// PlanSolver: the fastest plan that the search finds with a peak within a number of bytes, for any graph of operators.
// A storage is kept, rebuilt, or, if the profile has a link, offloaded. The same profile and the same calls give the
// same plans on every machine: counts limit the work, not time.
//
//   snug::plan::PlanSolver solver(simulator);
//   auto answer = solver.solve(64 << 20);      // a RematPlan, or Infeasible with the smallest peak that was found
//
// search_step(): the outer search. The search chooses the number of micro-batches of a batch, and their plan, so that a
// whole step stays within a number of bytes and is as fast as possible.
//
//   auto found = snug::search_step({{.items = 64, .simulator = &all}, {.items = 32, .simulator = &half}},
//                                  {.batch = 64, .budget = 300 << 20, .fixed_bytes = parameters,
//                                   .gradient_bytes = gradients});
//   if (!found.choice) std::cout << "the smallest budget found is " << found.smallest_feasible_bytes << " bytes\n";
//
// PlanCurve: the cost of a step under every budget, from plain training down to the fewest bytes for which a plan was
// found.
//
//   snug::plan::PlanCurve curve = snug::plan::plan_curve(simulator);
//   std::cout << curve.table();
//
// lower_bound_seconds() and lower_bound_bytes(): the least time of any plan within a number of bytes, and the fewest
// bytes of any plan.

#include <compare>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "snug/profile.h"

namespace snug::plan {

/// The way in which a plan treats a storage.
struct Stay {
  enum class Kind : uint8_t {
    /// As Offloaded, but the program continues during transfers. The storage is in memory until the bytes are written,
    /// and the transfer back begins before the first need.
    Streamed,
    /// The bytes leave when the program lets go of the storage, and are in memory from the first need to the last.
    Offloaded,
    /// The storage is in memory from the operator that makes the storage to the last need.
    Kept,
    /// The storage is rebuilt when needed, and in memory from the first rebuild at or after `event` to the last need.
    From,
    /// The storage is rebuilt for each need.
    Never,
  };

  Kind kind = Kind::Kept;
  int event = 0;  ///< an event of the profile; 0 except for From

  /// A Stay of each kind. A storage with once_rebuilt() is in memory from the very first rebuild.
  static constexpr Stay streamed() { return {Kind::Streamed}; }
  static constexpr Stay offloaded() { return {Kind::Offloaded}; }
  static constexpr Stay kept() { return {Kind::Kept}; }
  static constexpr Stay from(int event) { return {Kind::From, event}; }
  static constexpr Stay once_rebuilt() { return from(0); }
  static constexpr Stay never() { return {Kind::Never}; }

  /// Whether the storage's bytes go over the profile's link.
  constexpr bool leaves() const { return kind == Kind::Streamed || kind == Kind::Offloaded; }
  /// Whether a rebuild during event `number` is the last rebuild.
  constexpr bool holds_rebuilt_at(int number) const { return *this <= from(number); }

  /// Order: Streamed, Offloaded, Kept, From (earlier events first), Never. Among Stays that leave, and among other
  /// Stays, the Stay with which the storage is in memory for longer is less.
  friend constexpr auto operator<=>(const Stay&, const Stay&) = default;
};

/// A Stay for each storage of the profile. Entries of external storages mean nothing.
using Stays = std::vector<Stay>;

/// Plain training: storages that the backward pass asks for are kept, all other storages are not.
Stays keep_all(const StepProfile& profile);

/// Preparation of the Unpack at `event`: first the offloaded storages of `loads` come back, then the `operators` run
/// again, both in the order of the lists.
struct Replay {
  int event = 0;
  std::vector<int> loads = {};
  std::vector<int> operators = {};
};

/// A storage that is in memory at the peak, and the storage's bytes.
struct LiveStorage {
  int storage = 0;
  int64_t bytes = 0;
  bool rebuilt = false;  ///< an intermediate of a replay

  friend bool operator==(const LiveStorage&, const LiveStorage&) = default;
};

/// A step under a plan. Which fields are valid:
///
/// - is_cut_short: `steps` and `replayed` only;
/// - otherwise all fields if `impossible` is -1.
struct Simulation {
  int impossible = -1;          ///< a storage that the plan drops and nothing can rebuild; -1: no such storage
  bool is_cut_short = false;    ///< more operators had to run again than was allowed
  int64_t replayed = 0;         ///< operators that run again
  int64_t steps = 0;            ///< of the simulation itself: events, values and operators that were examined
  double seconds = 0;           ///< of all operators, replays and transfers included
  int64_t peak_bytes = 0;       ///< above the level before the step
  int peak_event = 0;           ///< the first event that reaches the peak
  std::vector<int64_t> high;    ///< the highest level during each event
  std::vector<Replay> replays;  ///< in order
  /// Per storage: the event after which the plan no longer holds the storage; -1: the plan never holds the storage.
  std::vector<int> last_use;
  std::vector<int> offloaded;  ///< storages whose bytes leave, in order
  /// Per storage that streams: the Forward event that waits until the storage is written; -1: no event.
  std::vector<int> written_by;
  /// Per storage that streams: the Unpack at which the storage's transfer back begins; -1: when needed.
  std::vector<int> fetched_at;
};

/// Predicts a step under any plan of a profile.
class StepSimulator {
 public:
  /// Keeps a copy. Throws ConfigError if the profile contradicts itself.
  explicit StepSimulator(StepProfile profile);

  /// The profile of the simulated step.
  const StepProfile& profile() const { return profile_; }

  /// Simulates the step under `stays`. A chain that keeps nothing replays as many operators as the square of the
  /// chain's length; the simulation is cut short as soon as more than `most_replayed` operators have to run again.
  ///
  /// Throws ConfigError:
  ///
  /// - unless `stays` has as many entries as the profile has storages;
  /// - if a storage leaves, and the profile's link is not open.
  Simulation run(const Stays& stays, int64_t most_replayed = std::numeric_limits<int64_t>::max()) const;

  /// The storages that are alive at the peak, in order of storages, without the backward pass's own bytes.
  std::vector<LiveStorage> live_at_peak(const Stays& stays) const;

  /// The operator that makes a value; -1 for a value from before the step.
  int producer(ValueId value) const;
  /// The version of a storage after the last write.
  int last_version(int storage) const;
  /// The operator that makes a storage's last version; -1 for a storage from before the step, or if nothing makes the
  /// storage.
  int last_producer(int storage) const;

  /// The values that an operator needs: the operator's reads and, for each write in place, the version before.
  const std::vector<ValueId>& needs(int op) const { return needs_[static_cast<size_t>(op)]; }

 private:
  class Run;

  StepProfile profile_;
  std::vector<std::vector<int>> producers_;  // [storage][version]
  std::vector<std::vector<ValueId>> needs_;  // [operator]
};

}  // namespace snug::plan

namespace snug {

/// The fate of each storage in a training step, and the predicted cost.
struct RematPlan {
  plan::Stays stays = {};
  int64_t peak_bytes = 0;  ///< predicted, above the level before the step
  double seconds = 0;      ///< predicted: plain_seconds, all replays and transfers
  int64_t plain_peak_bytes = 0;
  double plain_seconds = 0;
  double bound_seconds = 0;  ///< no plan within the budget is faster

  /// How much slower than the fastest plan the plan can be at most, as a share of the fastest plan's time: 0.01 is one
  /// per cent.
  double gap() const { return bound_seconds > 0 ? seconds / bound_seconds - 1 : 0; }

  /// The plan as JSON, from which seconds are read back bit for bit.
  std::string to_json() const;

  /// Reads a plan. Throws ConfigError if `text` is not a plan, or is a plan of another format version.
  static RematPlan from_json(std::string_view text);

  friend bool operator==(const RematPlan&, const RematPlan&) = default;
};

/// A text for people, with at most `rows` lines of each:
///
/// - peak and time against plain training and the bound;
/// - the storages that are rebuilt, or go to disk or host memory, and the cost, by operator;
/// - the storages that are alive at the peak, by operator.
///
/// Throws ConfigError if plan and profile do not belong together.
std::string explain(const plan::StepSimulator& simulator, const RematPlan& plan, int rows = 8);

}  // namespace snug

namespace snug::plan {

/// No plan was found within the budget.
struct Infeasible {
  int64_t smallest_feasible_bytes = 0;  ///< the smallest peak of any plan that was found
};

/// A plan within the budget, or the smallest budget for which a plan was found.
using PlanAnswer = std::variant<RematPlan, Infeasible>;

/// The work of a search.
struct SolverOptions {
  /// Events, and operators replayed, that are simulated for each budget. Replayed operators count twice. The default
  /// was chosen to plan a model of 48 blocks in less than a second.
  int64_t work = 9'000'000;
};

/// Searches plans of a step. Plans found for a budget are candidates for every later budget.
class PlanSolver {
 public:
  /// Keeps a reference to the simulator.
  explicit PlanSolver(const StepSimulator& simulator, SolverOptions options = {});
  ~PlanSolver();
  PlanSolver(PlanSolver&&) noexcept;

  /// The fastest plan within `budget` bytes that was found in this call or in an earlier call. A repeated call is
  /// answered without another search, unless smallest() has found a plan within `budget` in between.
  PlanAnswer solve(int64_t budget);

  /// An answer for each budget. Budgets may have any order, and answers have the same order. A larger budget never has
  /// a slower plan.
  std::vector<PlanAnswer> curve(std::vector<int64_t> budgets);

  /// The plan of the fewest bytes that a search by bytes alone finds. Measured times have no influence: another profile
  /// of the same step, with slightly different times, has the same smallest plan, so messages to people may name the
  /// plan's bytes. Later calls of solve() consider the plan, and may find a faster plan that takes no more bytes.
  RematPlan smallest();

  /// Number of plans simulated so far.
  int64_t simulations() const;
  /// Steps of all simulations (see Simulation), and of estimates of the time of rebuilds.
  int64_t steps() const;

 private:
  class Search;
  std::unique_ptr<Search> search_;
};

}  // namespace snug::plan

namespace snug {

/// A size of micro-batches that the search may choose.
struct MicroBatchCandidate {
  int64_t items = 0;                               ///< in every micro-batch; the last may have fewer
  const plan::StepSimulator* simulator = nullptr;  ///< of a micro-batch of so many items; not owned
  int64_t own_bytes = 0;                           ///< in memory beside its activations, for example copies of items
  plan::PlanSolver* solver = nullptr;              ///< of the simulator, with answers of earlier searches; null: none
};

/// The step that must fit, and the memory and time beside the step's activations.
struct StepSearchOptions {
  int64_t batch = 0;             ///< items in a step
  int64_t budget = 0;            ///< bytes, for everything
  int64_t fixed_bytes = 0;       ///< in memory all the time: parameters, buffers, optimizer state, buckets
  int64_t gradient_bytes = 0;    ///< in memory from the second micro-batch on, and for the optimizer
  int64_t optimizer_bytes = 0;   ///< workspace of the optimizer's step
  double optimizer_seconds = 0;  ///< of the optimizer's step
  plan::SolverOptions solver = {};
};

/// The micro-batch and the plan with which a whole step is fastest.
struct StepChoice {
  int64_t items = 0;          ///< in a micro-batch
  int64_t micro_batches = 1;  ///< in a step
  RematPlan plan = {};        ///< of a micro-batch
  int64_t peak_bytes = 0;     ///< predicted, of everything
  double seconds = 0;         ///< predicted, of the step

  /// The choice as JSON, from which seconds are read back bit for bit.
  std::string to_json() const;

  /// Reads a choice. Throws ConfigError if `text` is not a choice, or is a choice of another format version.
  static StepChoice from_json(std::string_view text);

  friend bool operator==(const StepChoice&, const StepChoice&) = default;
};

/// The result for a single candidate.
struct ConsideredStep {
  int64_t items = 0;
  int64_t micro_batches = 1;
  int64_t plain_peak_bytes = 0;  ///< of everything, with nothing rebuilt
  double plain_seconds = 0;
  std::string verdict = {};
};

/// The result of search_step().
struct StepSearch {
  std::optional<StepChoice> choice = {};        ///< empty if nothing fits
  int64_t smallest_feasible_bytes = 0;          ///< if nothing fits: the smallest budget for which a plan was found
  int64_t lower_bound_bytes = 0;                ///< if nothing fits: no plan of any candidate takes fewer bytes
  std::vector<ConsideredStep> considered = {};  ///< in the order of their plain times

  /// A text for people: a line for each candidate.
  std::string explain() const;
};

/// The fastest step within the budget. Of equally fast candidates, the larger micro-batch is chosen. A candidate is not
/// solved if bounds show that no plan fits, or that no plan that fits is faster than the choice.
///
/// Throws ConfigError:
///
/// - if `candidates` is empty;
/// - for a batch, or a candidate, of fewer than 1 items;
/// - for a candidate without a simulator.
StepSearch search_step(const std::vector<MicroBatchCandidate>& candidates, const StepSearchOptions& options);

}  // namespace snug

namespace snug::plan {

/// Plans of a step for falling budgets.
struct PlanCurve {
  /// Plain training is the first point. Each later point takes fewer bytes, and never fewer seconds.
  std::vector<RematPlan> points = {};

  /// Predicted peak of the most frugal plan that was found. A smaller budget is refused.
  int64_t smallest_feasible_bytes() const { return points.back().peak_bytes; }

  /// The fastest point within `budget` bytes; null if no point fits.
  const RematPlan* within(int64_t budget) const;

  /// A text for people: a line for each point with bytes, time, and the largest possible distance from the best plan.
  std::string table() const;

  friend bool operator==(const PlanCurve&, const PlanCurve&) = default;
};

struct CurveOptions {
  int points = 10;  ///< budgets that are tried, in equal steps; at least 2. Equal answers become a single point.
  /// Work for each budget. The default is less than the default of a single search, because the search for each budget
  /// begins with the plans of the budgets before.
  SolverOptions solver = {.work = 4'000'000};
};

/// The curve of a step. Throws ConfigError for fewer than 2 points.
PlanCurve plan_curve(const StepSimulator& simulator, CurveOptions options = {});

/// A bound on time: no plan within `budget` bytes takes fewer seconds. Infinity if the bound shows that no plan fits.
double lower_bound_seconds(const StepSimulator& simulator, int64_t budget);
/// A bound on bytes: no plan has a lower peak. So many bytes are alive during some event of the step even if every
/// storage is absent that may be absent during the event.
int64_t lower_bound_bytes(const StepSimulator& simulator);

}  // namespace snug::plan
