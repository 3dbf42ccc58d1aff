#pragma once
// Stay: what a plan does with one storage. A plan is one Stay for each storage of a profile.

#include <compare>
#include <cstdint>
#include <vector>

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

}  // namespace snug::plan
