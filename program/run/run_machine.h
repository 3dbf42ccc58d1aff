#pragma once
// The machine that a run is on, as far as it decides how sums are rounded: a run that goes on elsewhere may get other
// last bits.

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "program/report/run_log.h"

namespace snug::detail {

/// "machine": the number of ranks, and of this rank the threads, the version of LibTorch, the CPU's vector instructions
/// and the device, of which the model is not told. It holds for the steps after `step`.
RunEvent machine_event(int64_t step, int64_t ranks, c10::Device device);

/// The machine that the steps after `step` were to have had; none where the log has none.
LogValues machine_after(const RunHistory& log, int64_t step);

/// "threads 1, not 2" for each value of `now` that differs from the machine that made the step `now.step`. None for
/// step 0, which no machine made, and where the log has none.
std::vector<std::string> machine_changes(const RunHistory& log, const RunEvent& now);

}  // namespace snug::detail
