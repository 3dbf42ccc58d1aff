#pragma once
// gradient_map: the sizes of each parameter's gradients at the last sampled step, one row a parameter, one column a
// power of two, next to the range of FP16 with and without the step's loss scale. Drawn from the log's "gradients"
// events. Internal to report.

#include <string>
#include <vector>

#include "program/report/run_log.h"

namespace snug::detail {

/// The name of the events with the statistics of one parameter: parameter (string), elements, zeros, non_finite,
/// lowest_exponent (integers), exponents (string of counts with spaces between); in 16 bits also lost_updates (share of
/// the weights that did not move).
inline constexpr const char* kGradientsEvent = "gradients";

/// Returns a figure, or nothing if no gradients were sampled. Events of another form are left out. `loss_scale`: the
/// loss scale of the sampled step.
std::string gradient_map(const std::vector<RunEvent>& events, double loss_scale);

/// The step of the last sample, or 0.
int64_t last_gradient_sample(const std::vector<RunEvent>& events);

}  // namespace snug::detail
