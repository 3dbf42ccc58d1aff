#pragma once
// Training steps under plans.

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

#include "snug/plan.h"

namespace snug::plan {
struct Profile;
}

namespace snug::measure {

/// `forward` under the plan.
std::function<at::Tensor()> under_plan(std::function<at::Tensor()> forward, ActivationPlan plan);

/// The fewest bytes for which the planner finds a plan; above the level before the step, gradients included.
int64_t least_bytes_of_plan(const plan::Profile& profile);

}  // namespace snug::measure
