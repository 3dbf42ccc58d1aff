#pragma once
// Stay: what a plan does with one storage. A plan is one Stay for each storage of a profile.
//
// StepSimulator: time, memory and replays of one forward and backward pass under a plan, without running it.
//
//   snug::StepSimulator simulator(profile);
//   snug::Simulation result = simulator.run(snug::keep_all(profile));     // result.peak_bytes, result.seconds
//
// The executor of a plan follows the rules at the top of simulator.cpp. Both find replays with planner/replay.h.
//
// RematPlan: what stays, what is rebuilt and what is offloaded in one training step, with what that costs; and its
// explanation.
//
// PlanSolver: the fastest plan it can find whose peak stays within a number of bytes, for any graph of operators. A
// storage is kept, rebuilt, or, where the profile has a link, offloaded.
//
//   snug::PlanSolver solver(simulator);
//   auto answer = solver.solve(64 << 20);      // a RematPlan, or Infeasible with the number that would do
//
// The same profile and the same calls give the same plans on every machine: work is limited by counts, not by time.
//
// The outer search: into how many micro-batches to cut a batch, and with which plan, so that a whole step stays within
// a number of bytes and is as fast as can be.
//
//   auto found = snug::search_step({{.items = 64, .simulator = &all}, {.items = 32, .simulator = &half}},
//                                  {.batch = 64, .budget = 300 << 20, .fixed_bytes = parameters,
//                                   .gradient_bytes = gradients});
//   if (!found.choice) std::cout << found.smallest_feasible_bytes << " bytes would do\n";
//
// PlanCurve: what a step costs under every budget, from plain training down to the fewest bytes with which it can still
// be done.
//
//   snug::PlanCurve curve = snug::plan_curve(simulator);
//   std::cout << curve.table();
//
// How fast a plan within a number of bytes can be at best, and how few bytes any plan takes.

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

struct Stay {
  enum class Kind : uint8_t {
    Streamed,  ///< As Offloaded, while the program goes on: the bytes are there until they are written, and come early.
    Offloaded,  ///< Its bytes leave when the program lets go of it, and are there from the first need to the last.
    Kept,       ///< It is there from the operator that makes it to the last need.
    From,   ///< It is rebuilt when it is needed, and there from the first rebuild at or after `event` to the last need.
    Never,  ///< It is rebuilt for each need.
  };

  Kind kind = Kind::Kept;
  int event = 0;  ///< of the profile; 0 but for From

  /// One of each kind; once_rebuilt() is there from the first rebuild at all.
  static constexpr Stay streamed() { return {Kind::Streamed}; }
  static constexpr Stay offloaded() { return {Kind::Offloaded}; }
  static constexpr Stay kept() { return {Kind::Kept}; }
  static constexpr Stay from(int event) { return {Kind::From, event}; }
  static constexpr Stay once_rebuilt() { return from(0); }
  static constexpr Stay never() { return {Kind::Never}; }

  /// Whether its bytes go over the profile's link.
  constexpr bool leaves() const { return kind == Kind::Streamed || kind == Kind::Offloaded; }
  /// Whether a rebuild during event `number` is the last one.
  constexpr bool holds_rebuilt_at(int number) const { return *this <= from(number); }

  /// The one that is there for longer is less.
  friend constexpr auto operator<=>(const Stay&, const Stay&) = default;
};

/// One per storage of the profile. Entries of external storages mean nothing.
using Stays = std::vector<Stay>;

/// Plain training: what the backward pass asks for is kept, all else is not.
Stays keep_all(const StepProfile& profile);

/// Before the Unpack at `event` can be answered, offloaded storages that come back, and then operators that run again,
/// in this order.
struct Replay {
  int event = 0;
  std::vector<int> loads = {};
  std::vector<int> operators = {};
};

/// A storage that is there at the peak, and its bytes.
struct LiveStorage {
  int storage = 0;
  int64_t bytes = 0;
  bool rebuilt = false;  ///< an intermediate of a replay

  friend bool operator==(const LiveStorage&, const LiveStorage&) = default;
};

struct Simulation {
  int impossible = -1;          ///< a storage that the plan drops and nothing can rebuild; -1: none, and the rest holds
  bool is_cut_short = false;    ///< more operators would run again than was allowed: only `steps` and `replayed` hold
  int64_t replayed = 0;         ///< operators that run again
  int64_t steps = 0;            ///< of the simulation itself: events, values and operators that it looked at
  double seconds = 0;           ///< of all operators, replays and transfers included
  int64_t peak_bytes = 0;       ///< above the level before the step
  int peak_event = 0;           ///< during which it is reached first
  std::vector<int64_t> high;    ///< the highest level during each event
  std::vector<Replay> replays;  ///< in order
  std::vector<int> last_use;    ///< per storage: the event after which the plan holds it no longer, -1: not at all
  std::vector<int> offloaded;   ///< storages whose bytes leave, in order
  std::vector<int>
      written_by;  ///< per storage that streams: the Forward event that waits until it is written; -1: none
  std::vector<int> fetched_at;  ///< per storage that streams: the Unpack at which its way back begins; -1: when needed
};

class StepSimulator {
 public:
  /// Keeps a copy. Throws ConfigError where the profile contradicts itself.
  explicit StepSimulator(StepProfile profile);

  /// What it simulates.
  const StepProfile& profile() const { return profile_; }

  /// Throws ConfigError unless there is one entry per storage, and for what leaves where the profile's link is not
  /// open. `most_replayed`: as soon as more operators would run again, it is cut short. A chain that keeps nothing
  /// replays as many as the square of its length.
  Simulation run(const Stays& stays, int64_t most_replayed = std::numeric_limits<int64_t>::max()) const;

  /// What is alive at the peak, in order of storages; the backward pass's own bytes are not among it.
  std::vector<LiveStorage> live_at_peak(const Stays& stays) const;

  /// The operator that makes a value; -1 for what was there before.
  int producer(ValueId value) const;
  int last_version(int storage) const;
  /// The operator that makes a storage's last version; -1 for what was there before, and for what nothing makes.
  int last_producer(int storage) const;

  /// What an operator needs: its reads and, for each write in place, the version before.
  const std::vector<ValueId>& needs(int op) const { return needs_[static_cast<size_t>(op)]; }

 private:
  class Run;

  StepProfile profile_;
  std::vector<std::vector<int>> producers_;  // [storage][version]
  std::vector<std::vector<ValueId>> needs_;  // [operator]
};

}  // namespace snug::plan

namespace snug {

struct RematPlan {
  plan::Stays stays = {};
  int64_t peak_bytes = 0;  ///< predicted, above the level before the step
  double seconds = 0;      ///< predicted: plain_seconds, all replays and transfers
  int64_t plain_peak_bytes = 0;
  double plain_seconds = 0;
  double bound_seconds = 0;  ///< no plan within the budget is faster than this

  /// How far it can be from the fastest plan, as a share of that plan's time at most: 0.01 is one per cent.
  double gap() const { return bound_seconds > 0 ? seconds / bound_seconds - 1 : 0; }

  /// Seconds read back bit for bit.
  std::string to_json() const;

  /// Throws ConfigError for what is not a plan, or is one of another format version.
  static RematPlan from_json(std::string_view text);

  friend bool operator==(const RematPlan&, const RematPlan&) = default;
};

/// For people: peak and time against plain training and the bound, what is rebuilt or goes to disk and what that costs
/// by operator, and who is alive at the peak; at most `rows` lines of each. Throws ConfigError if plan and profile do
/// not belong together.
std::string explain(const plan::StepSimulator& simulator, const RematPlan& plan, int rows = 8);

}  // namespace snug

namespace snug::plan {

struct Infeasible {
  int64_t smallest_feasible_bytes = 0;  ///< the smallest peak of any plan that was found
};

/// A plan within the budget, or the smallest budget for which there is one.
using PlanAnswer = std::variant<RematPlan, Infeasible>;

struct SolverOptions {
  int64_t work = 9'000'000;  ///< events, and operators replayed, that are simulated per budget
};

class PlanSolver {
 public:
  /// Keeps a reference to the simulator.
  explicit PlanSolver(const StepSimulator& simulator, SolverOptions options = {});
  ~PlanSolver();
  PlanSolver(PlanSolver&&) noexcept;

  /// The fastest plan found so far, in this call or an earlier one, that fits into `budget` bytes.
  PlanAnswer solve(int64_t budget);

  /// One answer per budget: a larger budget never has a slower plan. Any order.
  std::vector<PlanAnswer> curve(std::vector<int64_t> budgets);

  /// The most frugal plan that it can find by bytes alone: another profile of the same step, whose times are a little
  /// different, has the same one, so its bytes can be told to people. solve() knows of it afterwards, and may find a
  /// faster one that takes no more.
  RematPlan smallest();

  /// How many plans it has simulated so far.
  int64_t simulations() const;
  /// Of all simulations, and of estimates of what a rebuild takes: see Simulation.
  int64_t steps() const;

 private:
  class Search;
  std::unique_ptr<Search> search_;
};

}  // namespace snug::plan

namespace snug {

struct MicroBatchCandidate {
  int64_t items = 0;                               ///< in every micro-batch; the last may have fewer
  const plan::StepSimulator* simulator = nullptr;  ///< of one with that many; not owned
  int64_t own_bytes = 0;                           ///< there beside its activations, such as copies of its items
};

/// The step that is to fit, and what is there beside its activations.
struct StepSearchOptions {
  int64_t batch = 0;             ///< items in a step
  int64_t budget = 0;            ///< bytes, for everything
  int64_t fixed_bytes = 0;       ///< there all the time: parameters, buffers, optimizer state, buckets
  int64_t gradient_bytes = 0;    ///< there from the second micro-batch on, and for the optimizer
  int64_t optimizer_bytes = 0;   ///< workspace of the optimizer's step
  double optimizer_seconds = 0;  ///< of its step
  plan::SolverOptions solver = {};
};

struct StepChoice {
  int64_t items = 0;          ///< in a micro-batch
  int64_t micro_batches = 1;  ///< in a step
  RematPlan plan = {};        ///< of one
  int64_t peak_bytes = 0;     ///< predicted, of everything
  double seconds = 0;         ///< predicted, of the step

  /// Seconds read back bit for bit.
  std::string to_json() const;

  /// Throws ConfigError for what is not a choice, or is one of another format version.
  static StepChoice from_json(std::string_view text);

  friend bool operator==(const StepChoice&, const StepChoice&) = default;
};

/// What became of one candidate.
struct ConsideredStep {
  int64_t items = 0;
  int64_t micro_batches = 1;
  int64_t plain_peak_bytes = 0;  ///< of everything, with nothing rebuilt
  double plain_seconds = 0;
  std::string verdict = {};
};

struct StepSearch {
  std::optional<StepChoice> choice = {};        ///< none if nothing fits
  int64_t smallest_feasible_bytes = 0;          ///< without a choice: the budget that would do
  int64_t lower_bound_bytes = 0;                ///< without a choice: no plan of any candidate takes less
  std::vector<ConsideredStep> considered = {};  ///< in the order of their plain times

  /// For people: a line for each candidate.
  std::string explain() const;
};

/// Equal times: the larger micro-batch. Candidates that would be slower even if they kept everything are not solved.
/// Throws ConfigError for no candidates, and sizes below 1.
StepSearch search_step(const std::vector<MicroBatchCandidate>& candidates, const StepSearchOptions& options);

}  // namespace snug

namespace snug::plan {

struct PlanCurve {
  /// Plain training first; then ever fewer bytes and never fewer seconds.
  std::vector<RematPlan> points = {};

  /// Predicted, of the most frugal plan that was found: a smaller budget is refused.
  int64_t smallest_feasible_bytes() const { return points.back().peak_bytes; }

  /// The fastest point within `budget` bytes; null if there is none.
  const RematPlan* within(int64_t budget) const;

  /// For people: a line for each point with its bytes, its time, and how far it can be from the best.
  std::string table() const;

  friend bool operator==(const PlanCurve&, const PlanCurve&) = default;
};

struct CurveOptions {
  int points = 10;  ///< budgets that are tried, in equal steps; at least 2. Equal answers become one point.
  /// Work for each of them: less than a search alone takes, since each begins with the plans of the others.
  SolverOptions solver = {.work = 4'000'000};
};

/// Throws ConfigError for fewer than 2 points.
PlanCurve plan_curve(const StepSimulator& simulator, CurveOptions options = {});

/// Seconds that no plan within `budget` bytes undercuts; infinity if it can be seen that none fits.
double lower_bound_seconds(const StepSimulator& simulator, int64_t budget);
/// Peak in bytes that no plan undercuts: what is alive in some event when all is absent that may be absent then.
int64_t lower_bound_bytes(const StepSimulator& simulator);

}  // namespace snug::plan
