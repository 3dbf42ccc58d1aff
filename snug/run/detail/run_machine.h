#pragma once
// The machine that a run is on, as far as it decides how sums are rounded: a run that goes on elsewhere may get other
// last bits.

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "snug/report/run_log.h"
#include "snug/run/config.h"
#include "snug/step/stepper.h"

namespace snug::detail {

/// "machine": ranks, threads, the version of LibTorch, the CPU's vector instructions, the device, the type that is
/// computed in, and the micro-batch, or the memory limit that it is chosen for.
RunEvent machine_event(int64_t step, const TrainConfig& config, int64_t ranks, const Stepper& stepper);

/// "threads 1, not 2" for each that differs from the newest of `events`; none where no machine is among them, as in a
/// log of an earlier version.
std::vector<std::string> other_than_before(const RunEvent& machine, const std::vector<RunEvent>& events);

}  // namespace snug::detail
