#pragma once
// Simulator: time, memory and replays of a forward and backward pass under a plan. Nothing runs. The executor of a
// plan follows the rules at the top of simulator.cpp; simulator and executor find replays with planner/replay.h.
//
//   plan::Simulator simulator(profile);
//   plan::Simulation result = simulator.run(plan::keep_all(profile));  // result.peak_bytes, result.seconds

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "src/planner/profile.h"
#include "src/planner/stay.h"

namespace snug::plan {

/// Plain training: storages that the backward pass asks for are kept, all other storages are not.
Stays keep_all(const Profile& profile);

/// Preparation of the Unpack at `event`: first the offloaded storages of `loads` come back, then the `operators` run
/// again, both in the order of the lists.
struct Replay {
  int event = 0;
  std::vector<int> loads = {};
  std::vector<int> operators = {};
};

/// What is alive at the peak of a step, by kind.
struct AtPeak {
  enum Kind : uint8_t {
    Operator,    ///< operands, results and workspace of the operator that runs, forward, backward or again
    Replay,      ///< made by a replay, for a later operator of the replay
    Kept,        ///< held by the plan for backward
    HeldForUse,  ///< held by the program; a later operator of the forward pass uses the storage
    HeldIdle,    ///< held by the program, or by autograd for nothing; no later operator of the forward pass uses it
    OnTheirWay,  ///< gradients of results, made before the backward operator that runs
    Gradients,   ///< gradients of parameters
    Other,       ///< in no result of an operator: results of an earlier step that the program still holds, for example
    kKinds,
  };

  std::string runs = {};                   ///< the operator of Kind::Operator; empty: no operator runs
  std::array<int64_t, kKinds> bytes = {};  ///< by kind; the sum is Simulation::peak_bytes
  std::vector<int> storages = {};          ///< storages in memory; a storage may also be there a second time, rebuilt
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
  double seconds = 0;           ///< of all operators, replays and transfers included, and of the host
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

  /// Whether the step runs under a tape. Without replays and transfers plain training does the same.
  bool has_tape() const { return replayed > 0 || !offloaded.empty(); }
};

/// Predicts a step under any plan of a profile.
class Simulator {
 public:
  /// Keeps a copy. Throws ConfigError if the profile contradicts itself.
  explicit Simulator(Profile profile);

  /// The profile of the simulated step.
  const Profile& profile() const { return profile_; }

  /// Simulates the step under `stays`. A chain that keeps nothing replays as many operators as the square of the
  /// chain's length; the simulation is cut short as soon as more than `most_replayed` operators have to run again.
  ///
  /// Throws ConfigError:
  ///
  /// - unless `stays` has as many entries as the profile has storages;
  /// - if a storage leaves, and the profile's link is not open.
  Simulation run(const Stays& stays, int64_t most_replayed = std::numeric_limits<int64_t>::max()) const;

  /// What is alive at the peak under a plan. A storage that the program holds is of the program's kinds, even if the
  /// plan keeps the storage, unless the storage cannot be rebuilt: no plan lets go of the storage there.
  AtPeak at_peak(const Stays& stays) const;

  /// The operator that makes a value; -1 for a value from before the step.
  int producer(Value value) const;
  /// The version of a storage after the last write.
  int last_version(int storage) const;
  /// The operator that makes a storage's last version; -1 for a storage from before the step, or if nothing makes the
  /// storage.
  int last_producer(int storage) const;

  /// The values that an operator needs: the operator's reads and, for each write in place, the version before.
  const std::vector<Value>& needs(int op) const { return needs_[static_cast<size_t>(op)]; }

 private:
  class Run;

  Profile profile_;
  std::vector<std::vector<int>> producers_;  // [storage][version]
  std::vector<std::vector<Value>> needs_;    // [operator]
};

}  // namespace snug::plan
