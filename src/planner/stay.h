#pragma once
// Stay and Stays: a plan as data. A Stay says what the plan does with a storage; a plan has a Stay for each storage of
// a profile.

#include <compare>
#include <cstdint>
#include <vector>

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

}  // namespace snug::plan
