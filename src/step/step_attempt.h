#pragma once
// StepAttempt: how one try of a step, or of a part of it, went.

#include <exception>
#include <functional>

#include <c10/core/Device.h>

#include "snug/core.h"

namespace snug::detail {

struct StepAttempt {
  enum class Outcome {
    Made,
    OutOfMemory,
    GroupLost,  ///< the ranks are not in step any more
    Failed,     ///< any other exception
  };
  Outcome outcome = Outcome::Made;
  /// As the caller of the Stepper is to see it: BudgetExceeded where a budget was the limit.
  std::exception_ptr error = {};
  Bytes smallest = Bytes(0);  ///< where out of memory: a budget that would do; 0: not known

  bool is_made() const { return outcome == Outcome::Made; }
};

/// Runs `part` with at most `budget` of tensors alive on `device`. Throws nothing.
StepAttempt attempt_step(c10::Device device, Bytes budget, const std::function<void()>& part);

}  // namespace snug::detail
