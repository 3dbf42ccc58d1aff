#include "src/step/step_attempt.h"

#include <fmt/format.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "snug/state.h"
#include "src/core/first_line.h"
#include "src/step/check_options.h"

namespace snug::detail {

StepAttempt attempt_step(c10::Device device, Bytes budget, const std::function<void()>& part) {
  using Outcome = StepAttempt::Outcome;
  try {
    check_budget(budget, device);
    const MemoryLimit limit(device, budget);
    part();
    return {};
  } catch (const BudgetExceeded& error) {
    return {.outcome = Outcome::OutOfMemory, .error = std::current_exception(), .smallest = error.smallest_feasible()};
  } catch (const DistributedError&) {
    return {.outcome = Outcome::GroupLost, .error = std::current_exception()};
  } catch (const std::exception& error) {
    if (!is_out_of_memory(error)) {
      return {.outcome = Outcome::Failed, .error = std::current_exception()};
    }
    if (budget.is_unlimited()) {
      return {.outcome = Outcome::OutOfMemory, .error = std::current_exception()};
    }
    const BudgetExceeded exceeded(fmt::format("Stepper.step: the step does not fit into the memory budget {}: {}",
                                              budget.str(), first_line(error)));
    return {.outcome = Outcome::OutOfMemory, .error = std::make_exception_ptr(exceeded)};
  } catch (...) {
    return {.outcome = Outcome::Failed, .error = std::current_exception()};
  }
}

}  // namespace snug::detail
