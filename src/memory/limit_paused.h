#pragma once

#include <cstdint>

#include <c10/core/Device.h>

#include "snug/core.h"

namespace snug::detail {

/// Switches limits of exactly `bytes` on `device` off until the end of the scope: for work that must not stop halfway,
/// and to find out how large a limit must be.
class [[nodiscard]] LimitPaused final {
 public:
  LimitPaused(c10::Device device, Bytes bytes);
  ~LimitPaused();
  LimitPaused(const LimitPaused&) = delete;
  LimitPaused& operator=(const LimitPaused&) = delete;

 private:
  c10::Device device_;
  int64_t bytes_;
};

}  // namespace snug::detail
