#pragma once
// Profile: a forward and backward pass as plain data. A planner decides from the profile what to keep and what to
// rebuild.
//
// A profile may be taken under any plan. Bytes that the plan keeps, and operators that the plan runs again, are left
// out. The profile is a single stream of events: operators, releases, saved tensors that the backward pass unpacks and
// is done with, and the backward pass's own allocations. The stream therefore tells when each storage dies if nothing
// saved holds the storage.
//
// A value is a (storage, version). The operator that allocates a storage makes version 0. Each write in place makes the
// next version and destroys the version before. Views share their storage and make nothing.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "snug/offload_link.h"

namespace snug::plan {

/// Origin of a storage.
enum class StorageKind {
  External,    ///< parameters, buffers, inputs: in memory before and after the step, and not counted
  Activation,  ///< made by an operator of the forward pass
  Pinned,      ///< made by an operator of the forward pass, but never rebuilt: other code may look at the storage
};

/// A storage of the step. The kind says whether the storage may be rebuilt.
struct Storage {
  std::string name = {};
  int64_t bytes = 0;
  StorageKind kind = StorageKind::Activation;

  friend bool operator==(const Storage&, const Storage&) = default;
};

/// The content of a storage between two writes.
struct Value {
  int storage = 0;
  int version = 0;

  friend auto operator<=>(const Value&, const Value&) = default;
};

/// An operator of the forward pass. An operator that writes version v > 0 also needs version v - 1, but `reads` does
/// not list version v - 1.
struct Operator {
  std::string name = {};
  double seconds = 0;
  int64_t workspace = 0;                ///< bytes above the outputs, while the operator runs
  std::vector<Value> reads = {};        ///< at their versions when the operator ran
  std::vector<Value> writes = {};       ///< version 0 allocates, unless the storage is external
  bool replayable = true;               ///< false: random, collective, with effects outside its outputs, or a reader of
                                        ///< memory that is written in backward
  bool reads_batch_statistics = false;  ///< normalises by the mean and variance of all items of a call

  friend bool operator==(const Operator&, const Operator&) = default;
};

/// The name of writes that are not operators: writes of batch normalisation to the running statistics, and writes that
/// were not seen when they happened.
inline constexpr std::string_view kOtherWrite = "snug::other_write";

/// An operator of the backward pass. The bytes that the operator takes and gives back are events.
struct BackwardStep {
  std::string name = {};
  double seconds = 0;
  int64_t gradient_bytes = 0;  ///< taken in the step and never given back: gradients of parameters

  friend bool operator==(const BackwardStep&, const BackwardStep&) = default;
};

/// Kind of an event, with the field of Event that the kind uses.
enum class EventKind {
  Forward,   ///< `index`: operator
  Drop,      ///< `index`: storage that the program lets go of; a saved storage lives on if the plan keeps it
  Unpack,    ///< `index`: storage whose last version the backward pass asks for
  Done,      ///< `index`: storage that an earlier Unpack no longer needs
  Allocate,  ///< `bytes` taken by the backward pass (gradients, workspace)
  Release,   ///< `bytes` given back
  Backward,  ///< `index`: backward step
};

/// An entry of the stream. EventKind says whether the event uses `index` or `bytes`.
struct Event {
  EventKind kind = EventKind::Forward;
  int index = 0;
  int64_t bytes = 0;

  friend bool operator==(const Event&, const Event&) = default;
};

/// The storages, operators and events of a step.
struct Profile {
  /// The device of all bytes and seconds, as torch writes the device's name. Bytes on other devices count nothing.
  std::string device = "cpu";
  std::vector<Storage> storages = {};
  std::vector<Operator> operators = {};  ///< in program order
  std::vector<BackwardStep> backward = {};
  std::vector<Event> events = {};
  /// The host's time, of the program and of LibTorch. On a CPU: between the operators of the forward pass. On other
  /// devices: for all calls, while the device works.
  double host_seconds = 0;
  /// The host's time that any plan takes beside its replays and transfers: of the tape. Keeping everything needs no
  /// tape.
  double tape_seconds = 0;
  OffloadLink link = {};  ///< for what a plan offloads

  /// Throws ConfigError that names the first event or operator that cannot have happened:
  ///
  /// - indices out of range;
  /// - operators that are missing, out of order, or after the beginning of the backward pass;
  /// - values read before they are made;
  /// - versions out of order;
  /// - use after release;
  /// - releases that do not match;
  /// - sizes, times or sums of bytes that are negative, not finite or too large.
  ///
  /// Throws ConfigError as well for a link whose speeds or seconds are negative or not finite, or whose kind is not for
  /// the device.
  void check() const;

  /// For each storage: whether the backward pass asks for the storage.
  std::vector<bool> saved_storages() const;

  /// Seconds of all operators, forward and backward, each run once.
  double operator_seconds() const;
  /// Seconds of a step whose operators and transfers take `seconds`, `replayed` of the operators for the second time. A
  /// CPU is the host. Another device works beside the host, and the slower of both sets the pace.
  double step_seconds(double seconds, bool has_tape, int64_t replayed = 0) const;
  /// Seconds of the step without a plan.
  double plain_seconds() const { return step_seconds(operator_seconds(), /*has_tape=*/false); }

  /// The profile as JSON, for a cache on disk. Seconds are read back bit for bit.
  std::string to_json() const;

  /// Reads and checks a profile. Throws ConfigError if `text` is not a profile, or is a profile of another format
  /// version.
  static Profile from_json(std::string_view text);

  friend bool operator==(const Profile&, const Profile&) = default;
};

}  // namespace snug::plan
