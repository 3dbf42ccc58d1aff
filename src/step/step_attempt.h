#pragma once
// StepAttempt: the outcome of one try of a step, or of a part of a step.

#include <exception>
#include <functional>

#include <c10/core/Device.h>

#include "snug/core.h"

namespace snug::detail {

struct StepAttempt {
  enum class Outcome {
    Made,
    OutOfMemory,
    GroupLost,  ///< the ranks are no longer in step
    Failed,     ///< any other exception
  };
  Outcome outcome = Outcome::Made;
  /// The exception for the caller of the Stepper: BudgetExceeded if a budget was the limit.
  std::exception_ptr error = {};
  Bytes smallest = Bytes(0);  ///< if out of memory: a sufficient budget; 0: unknown

  bool is_made() const { return outcome == Outcome::Made; }
};

/// Runs `part` with at most `budget` of tensors alive on `device`. Throws nothing.
StepAttempt attempt_step(c10::Device device, Bytes budget, const std::function<void()>& part);

}  // namespace snug::detail
