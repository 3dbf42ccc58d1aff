#pragma once
// TapeSchedule: a plan in terms of one OpTape. tape_schedule.cpp says how a plan becomes a schedule.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>

#include "src/activations/offload_store.h"
#include "src/planner/simulator.h"

namespace snug::detail {

/// How a tape treats a sequence of operators from a profile. Storages have the numbers of the plan::Profile.
struct TapeSchedule {
  struct Made {
    std::string name;
    std::optional<c10::OperatorHandle> op;  // none: nobody has registered an operator of this name
    size_t wiring;                          // hash of the operands and the written values, see wiring_of()
    std::vector<int64_t> bytes = {};        // of each storage made by the operator
    bool is_replayable = true;              // as the profile says, which knows what backward writes
    std::vector<int> waits_for = {};        // streamed storages that are written before the operator runs
  };
  struct ForStorage {
    bool keep_from_start = false;       // keep from the producer on
    bool keep_if_saved = false;         // keep while autograd has a tensor on the storage
    int hold_from = 0;                  // keep a copy rebuilt at this unpacking, counted from 0, or later
    bool is_pinned = false;             // never rebuilt
    bool is_offloaded = false;          // put away once the program lets go of the storage, until the next need
    bool streams = false;               // offloaded while the program goes on
    int needed_until = -1;              // last unpacking to ask for the storage or replay from the storage; -1: none
    std::vector<int> unpacked_at = {};  // the unpackings that ask for the storage
  };
  c10::Device device = c10::kCPU;  // the device whose bytes count
  std::vector<Made> operators;
  std::vector<ForStorage> storages;
  struct Unpacking {
    int storage;
    std::vector<int> last_for = {};  // storages without a need after this unpacking
    std::vector<int> fetches = {};   // streamed storages whose load begins here
  };
  std::vector<Unpacking> unpackings;
  bool is_guess = false;  // `unpackings` is a guess: one for each tensor that autograd saves, in about the right order
  std::shared_ptr<OffloadStore> store = {};  // receives offloaded storages
};

/// The device whose memory the profile describes. Throws ConfigError if profile.device does not name a device.
c10::Device device_of(const plan::Profile& profile);

/// A hash of the values that an operator reads and writes. A storage both read and written counts once, as written.
size_t wiring_of(std::span<const plan::Value> reads, std::span<const plan::Value> writes);

/// Makes the schedule of a plan. `simulation` must be the plan's simulation. Offloaded storages go to `store`. Without
/// `store`, offloaded storages go to a new store of the profile's link: throws Error if the new store cannot be made.
TapeSchedule make_schedule(const plan::Profile& profile, const plan::Stays& plan, const plan::Simulation& simulation,
                           const std::shared_ptr<OffloadStore>& store = nullptr);

}  // namespace snug::detail
