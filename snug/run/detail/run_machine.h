#pragma once
// The machine that a run is on, as far as it decides how sums are rounded: a run that goes on elsewhere may get other
// last bits.

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "snug/report/run_log.h"

namespace snug::detail {

/// "machine": the number of ranks, and of this rank the threads, the version of LibTorch, the CPU's vector instructions
/// and the kind of device. It holds for the steps after `step`. Two models of one kind of device are not told apart.
RunEvent machine_event(int64_t step, int64_t ranks, c10::Device device);

/// The details of the newest "machine" in the log; none where it has none, as a log of an earlier version.
LogValues newest_machine(const RunHistory& log);

/// The machine that made the step `step`; none for step 0. Of a log of an earlier version its kind of device alone.
LogValues machine_of_step(const RunHistory& log, int64_t step);

/// "threads 1, not 2" for each value that is another than before. Names that only one of the two has are passed over.
std::vector<std::string> machine_changes(const LogValues& before, const LogValues& now);

}  // namespace snug::detail
