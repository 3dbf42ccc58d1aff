#pragma once
// RngState: the state of torch's default random generators, captured and restored. Exact resume is based on it.
//
//   const auto state = snug::RngState::capture();
//   auto a = torch::rand(3);
//   state.restore();
//   auto b = torch::rand(3);   // equal to a
//
// The generators belong to the process: numbers that other threads draw between capture() and restore() are drawn again
// afterwards.

#include <memory>

#include "snug/core/state.h"

namespace snug {

/// State of the CPU's default generator and of the default generator of every device of the accelerator in use.
class RngState {
 public:
  /// The state of all those generators now.
  static RngState capture();
  /// Puts them back into this state.
  void restore() const;
  /// Whether the generators are in this state now. Also false if another generator has come into use since.
  bool is_current() const;
  /// Whether both states give the same numbers. Also false if a generator came into use in between.
  bool operator==(const RngState& other) const;

  /// The state as bytes: an entry for the CPU, and one for each device.
  StateDict state_dict() const;
  /// Throws CorruptFile if an entry is missing or is no state of this torch's generator. Skips devices that are absent
  /// on this machine.
  static RngState from_state_dict(const StateDict&);

 private:
  struct Copies;  // of the generators
  explicit RngState(std::shared_ptr<const Copies> copies) : copies_(std::move(copies)) {}
  std::shared_ptr<const Copies> copies_;
};

/// The generators as a part of a snapshot.
Stateful stateful_rng();

/// Restores the generators, at the end of the scope, to their state at the guard's construction.
class [[nodiscard]] RngGuard final {
 public:
  RngGuard() : state_(RngState::capture()) {}
  ~RngGuard() { state_.restore(); }
  RngGuard(const RngGuard&) = delete;
  RngGuard& operator=(const RngGuard&) = delete;

 private:
  RngState state_;
};

}  // namespace snug
