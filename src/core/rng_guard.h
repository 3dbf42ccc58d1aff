#pragma once

#include "snug/state.h"

namespace snug::detail {

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

}  // namespace snug::detail
