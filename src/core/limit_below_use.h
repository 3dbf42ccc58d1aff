#pragma once

#include "snug/core.h"

namespace snug::detail {

/// A limit below the bytes taken already, by tensors and by gaps between tensors. is_out_of_memory() is true of
/// LimitBelowUse.
class LimitBelowUse : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

}  // namespace snug::detail
