#pragma once
// RngState: what torch's default generators would give next, captured and put back. Recomputation and exact resume stand on it.
//
//   const auto state = snug::RngState::capture();
//   auto a = torch::rand(3);
//   state.restore();
//   auto b = torch::rand(3);   // equal to a

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/core/state.h"

namespace snug {

/// State of the CPU's default generator and of those of every CUDA device in use.
class RngState {
 public:
  static RngState capture();
  void restore() const;
  /// Whether the generators would give the same. False too where one of them came into use in between.
  bool operator==(const RngState& other) const;

  StateDict state_dict() const;
  /// Throws CorruptFile if an entry is missing or no state of this torch's generator; a device that is absent here is passed over.
  static RngState from_state_dict(const StateDict&);

 private:
  at::Tensor cpu_;                                        // uint8, as the generator gives it
  std::vector<std::pair<c10::Device, at::Tensor>> cuda_;  // likewise, on the host
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
