#pragma once
// The sin-cos experiment with ever wider networks.

#include <cstdint>

#include "program/compare/experiment.h"

namespace snug::cli {

/// Adds the time of an epoch in FP32 divided by the time in BF16, for wider and wider networks.
void sweep_two_tasks_width(Section& section, const CompareFlags& flags, int64_t points);

}  // namespace snug::cli
