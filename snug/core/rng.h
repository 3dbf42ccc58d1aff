#pragma once
// RngState: what torch's default generators would give next, captured and put back. Exact resume stands on it.
//
//   const auto state = snug::RngState::capture();
//   auto a = torch::rand(3);
//   state.restore();
//   auto b = torch::rand(3);   // equal to a
//
// The generators are the process's: what other threads draw between capture() and restore() is given out again.

#include <memory>

#include "snug/core/state.h"

namespace snug {

/// State of the CPU's default generator and of those of every device of the accelerator that is in use.
class RngState {
 public:
  static RngState capture();
  void restore() const;
  /// Whether the generators are in this state now. False too where one has come into use since.
  bool is_current() const;
  /// Whether the generators would give the same. False too where one of them came into use in between.
  bool operator==(const RngState& other) const;

  StateDict state_dict() const;
  /// Throws CorruptFile if an entry is missing or no state of this torch's generator; a device that is absent here is passed over.
  static RngState from_state_dict(const StateDict&);

 private:
  struct Copies;  // of the generators
  explicit RngState(std::shared_ptr<const Copies> copies) : copies_(std::move(copies)) {}
  std::shared_ptr<const Copies> copies_;
};

/// Puts the generators back to where they were when the guard was made.
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
