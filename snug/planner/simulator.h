#pragma once
// StepSimulator: time, memory and replays of one forward and backward pass under a plan, without running it.
//
//   snug::StepSimulator simulator(profile);
//   snug::Simulation result = simulator.run(snug::keep_all(profile));     // result.peak_bytes, result.seconds
//
// The executor of a plan follows the rules at the top of simulator.cpp. Both find replays with planner/detail/replay.h.

#include <cstdint>
#include <limits>
#include <vector>

#include "snug/planner/profile.h"
#include "snug/planner/stay.h"

namespace snug::plan {

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
