#pragma once
// StepProfile: one forward and backward pass as plain data, from which a planner decides what to keep and what to
// rebuild.
//
// It is taken under any plan, what that keeps and rebuilds left out, as one stream of events: operators, releases,
// saved tensors that the backward pass unpacks and is done with, and the backward pass's own allocations. So it tells
// when each storage dies if nothing saved holds it. A value is a (storage, version): the operator that allocates a
// storage makes version 0, each write in place makes the next and destroys the one before. Views share their storage
// and make nothing.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace snug {

enum class StorageKind {
  External,    ///< parameters, buffers, inputs: there before and after, and not counted
  Activation,  ///< made by an operator of the forward pass
  Pinned,      ///< likewise, but never rebuilt: somebody else may look at it
};

/// A storage of the step, and what may become of it.
struct StorageInfo {
  std::string name = {};
  int64_t bytes = 0;
  StorageKind kind = StorageKind::Activation;

  friend bool operator==(const StorageInfo&, const StorageInfo&) = default;
};

/// What one storage held between two writes.
struct ValueId {
  int storage = 0;
  int version = 0;

  friend auto operator<=>(const ValueId&, const ValueId&) = default;
};

/// An operator of the forward pass. One that writes version v > 0 also needs version v - 1; it is not listed in
/// `reads`.
struct ProfiledOperator {
  std::string name = {};
  double seconds = 0;
  int64_t workspace = 0;                ///< bytes above its outputs, while it runs
  std::vector<ValueId> reads = {};      ///< at their versions when it ran
  std::vector<ValueId> writes = {};     ///< version 0 allocates, unless the storage is external
  bool replayable = true;               ///< false: random, collective, or with effects outside its outputs
  bool reads_batch_statistics = false;  ///< normalises by the mean and variance of the items it is given together

  friend bool operator==(const ProfiledOperator&, const ProfiledOperator&) = default;
};

/// The name of writes that are no operator: those of batch normalisation to its running statistics, and those that were
/// not seen when they happened.
inline constexpr std::string_view kOtherWrite = "snug::other_write";

/// An operator of the backward pass; its bytes are events.
struct BackwardStep {
  std::string name = {};
  double seconds = 0;

  friend bool operator==(const BackwardStep&, const BackwardStep&) = default;
};

enum class EventKind {
  Forward,   ///< `index`: operator
  Drop,      ///< `index`: storage that the program lets go of; a saved one lives on if the plan keeps it
  Unpack,    ///< `index`: storage whose last version the backward pass asks for
  Done,      ///< `index`: storage that one earlier Unpack needs no more
  Allocate,  ///< `bytes` taken by the backward pass (gradients, workspace)
  Release,   ///< `bytes` given back
  Backward,  ///< `index`: backward step
};

/// One entry of the stream. EventKind says which of `index` and `bytes` it uses.
struct ProfileEvent {
  EventKind kind = EventKind::Forward;
  int index = 0;
  int64_t bytes = 0;

  friend bool operator==(const ProfileEvent&, const ProfileEvent&) = default;
};

/// Where memory may go while nothing needs it, and how fast. As it is: nowhere.
struct OffloadLink {
  enum class Kind : uint8_t {
    File,    ///< of what is in the host's memory
    Pinned,  ///< pinned memory of the host, for what is on a device
  };

  Kind kind = Kind::File;
  std::string directory = {};  ///< of the file; one in memory (tmpfs) frees nothing; empty: the system's temporary one
  double out_bytes_per_second = 0;
  double back_bytes_per_second = 0;
  double seconds = 0;  ///< of each transfer, beside those of its bytes

  /// Whether anything can go over it.
  bool is_open() const { return out_bytes_per_second > 0 && back_bytes_per_second > 0; }
  /// The time of one transfer of so many bytes: out, and back.
  double out_seconds(int64_t bytes) const { return seconds + static_cast<double>(bytes) / out_bytes_per_second; }
  double back_seconds(int64_t bytes) const { return seconds + static_cast<double>(bytes) / back_bytes_per_second; }

  friend bool operator==(const OffloadLink&, const OffloadLink&) = default;
};

struct StepProfile {
  std::string device = "cpu";  ///< whose bytes and seconds these are, as torch writes it; bytes elsewhere count nothing
  std::vector<StorageInfo> storages = {};
  std::vector<ProfiledOperator> operators = {};  ///< in program order
  std::vector<BackwardStep> backward = {};
  std::vector<ProfileEvent> events = {};
  OffloadLink link = {};  ///< for what a plan offloads

  /// Throws ConfigError that names the first event or operator that cannot have happened: indices out of range, values
  /// read before they are made, versions out of order, use after release, releases that do not match; or the link,
  /// if its speeds are none or its kind is not for the device.
  void check() const;

  /// Whether the backward pass asks for it, for each storage.
  std::vector<bool> saved_storages() const;

  /// Seconds of all operators, forward and backward, once.
  double plain_seconds() const;

  /// For a cache on disk. Seconds read back bit for bit.
  std::string to_json() const;

  /// Reads and checks it. Throws ConfigError for what is not a profile, or is one of another format version.
  static StepProfile from_json(std::string_view text);

  friend bool operator==(const StepProfile&, const StepProfile&) = default;
};

}  // namespace snug
