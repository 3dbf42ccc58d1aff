#pragma once
// The choice of the planner as the choice of a StepPlan, and back.

#include <memory>
#include <utility>

#include "snug/step_plan.h"
#include "src/planner/search.h"
#include "src/planner/solution.h"

namespace snug::detail {

inline StepChoice step_choice(plan::Choice choice) {
  return {.items = choice.items,
          .micro_batches = choice.micro_batches,
          .peak_bytes = choice.peak_bytes,
          .seconds = choice.seconds,
          .plan = std::make_shared<const plan::Solution>(std::move(choice.plan))};
}

inline plan::Choice planner_choice(const StepChoice& choice) {
  return {.items = choice.items,
          .micro_batches = choice.micro_batches,
          .plan = choice.plan ? *choice.plan : plan::Solution(),
          .peak_bytes = choice.peak_bytes,
          .seconds = choice.seconds};
}

}  // namespace snug::detail
