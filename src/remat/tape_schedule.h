#pragma once
// TapeSchedule: a plan in the words of an OpTape.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <ATen/core/operator_name.h>
#include <c10/core/Device.h>

#include "snug/planner.h"
#include "src/activations/offload_store.h"

namespace snug::detail {

/// How a tape treats a sequence of operators that is known. Storages have the numbers of a StepProfile.
struct TapeSchedule {
  struct Made {
    c10::OperatorName op;
    size_t wiring;                    // of its operands and what it writes
    std::vector<int64_t> bytes;       // of the storages that it makes
    std::vector<int> waits_for = {};  // streams, before it runs
  };
  struct ForStorage {
    bool keep_from_start = false;       // from the operator that makes it on
    bool keep_if_saved = false;         // while autograd has a tensor on it
    int hold_from = 0;                  // keep it if it is rebuilt at this unpacking, counted from 0, or later
    bool is_pinned = false;             // never rebuilt
    bool is_offloaded = false;          // put away when the program has let go of it, until it is needed
    bool streams = false;               // likewise, while the program goes on
    int needed_until = -1;              // the last unpacking that reads it for a replay or asks for it again; -1: none
    std::vector<int> unpacked_at = {};  // those that ask for it
  };
  c10::Device device = c10::kCPU;  // whose bytes count
  std::vector<Made> operators;
  std::vector<ForStorage> storages;
  struct Unpacking {
    int storage;
    std::vector<int> last_for = {};  // storages that nothing needs any more after it
    std::vector<int> fetches = {};   // streams whose way back begins
  };
  std::vector<Unpacking> unpackings;
  bool is_guess = false;  // of the unpackings: one for each tensor that autograd saves, in about the right order
  std::shared_ptr<OffloadStore> store = {};  // for what is put away
};

/// Whose memory a profile is of. Throws ConfigError if it names no device.
c10::Device device_of(const StepProfile& profile);

/// A hash of what an operator reads and writes. What is written counts once.
size_t wiring_of(std::span<const ValueId> reads, std::span<const ValueId> writes);

/// How a tape follows a plan. `simulation` is that of the plan. Offloaded storages go to `store`; without one, to a
/// store of the profile's link: throws Error if there can be none.
TapeSchedule make_schedule(const StepProfile& profile, const plan::Stays& plan, const plan::Simulation& simulation,
                           const std::shared_ptr<OffloadStore>& store = nullptr);

}  // namespace snug::detail
