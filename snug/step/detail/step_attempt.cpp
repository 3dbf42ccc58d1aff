#include "snug/step/detail/step_attempt.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/memory/limit.h"
#include "snug/step/detail/stepper_options.h"

namespace snug::detail {

StepAttempt attempt_step(c10::Device device, Bytes budget, const std::function<void()>& part) {
  using Outcome = StepAttempt::Outcome;
  try {
    check_budget(budget, device);
    const MemoryLimit limit(device, budget);
    part();
    return {};
  } catch (const c10::OutOfMemoryError& error) {
    if (budget.is_unlimited()) {
      return {.outcome = Outcome::OutOfMemory, .error = std::current_exception()};
    }
    const BudgetExceeded exceeded(fmt::format("Stepper.step: the step does not fit into memory_budget {}: {}",
                                              budget.str(), error.what_without_backtrace()));
    return {.outcome = Outcome::OutOfMemory, .error = std::make_exception_ptr(exceeded)};
  } catch (const BudgetExceeded& error) {
    return {.outcome = Outcome::OutOfMemory, .error = std::current_exception(), .smallest = error.smallest_feasible()};
  } catch (const DistributedError&) {
    return {.outcome = Outcome::GroupLost, .error = std::current_exception()};
  } catch (...) {
    return {.outcome = Outcome::Failed, .error = std::current_exception()};
  }
}

}  // namespace snug::detail
