#include "program/measure/plans.h"

#include <utility>

#include "src/planner/curve.h"

namespace snug::measure {

std::function<at::Tensor()> under_plan(std::function<at::Tensor()> forward, ActivationPlan plan) {
  return [forward = std::move(forward), plan = std::move(plan)] {
    const Rematerialize scope(plan);
    return forward();
  };
}

int64_t least_bytes_of_plan(const plan::Profile& profile) {
  return plan::curve(plan::Simulator(profile), {.points = 2}).smallest_feasible_bytes();
}

}  // namespace snug::measure
