#pragma once
// The machine of a run, as far as the machine decides how sums are rounded: a run that goes on elsewhere may get other
// last bits.

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "program/report/run_log.h"

namespace snug::detail {

/// "machine": the number of ranks, and of this rank the threads, the version of LibTorch, the CPU's vector instructions
/// and the device, without the device's model. The event holds for the steps after `step`.
RunEvent machine_event(int64_t step, int64_t ranks, c10::Device device);

/// The machine that the log names for the steps after `step`; empty if the log names none.
LogValues machine_after(const RunHistory& log, int64_t step);

/// "threads 1, not 2" for each value of `now` that differs from the machine that made the step `now.step`. Empty for
/// step 0, which no machine made, and if the log names no machine.
std::vector<std::string> machine_changes(const RunHistory& log, const RunEvent& now);

}  // namespace snug::detail
