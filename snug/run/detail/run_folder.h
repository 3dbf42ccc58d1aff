#pragma once
// The files of a run in its folder.

#include <cstdint>
#include <filesystem>
#include <optional>

#include "snug/report/run_log.h"
#include "snug/run/config.h"

namespace snug::detail {

/// Whether a run may not begin in `out`. A folder in which one was killed before its log was there is as good as none.
bool holds_something(const std::filesystem::path& out);

/// Removes what a kill in the midst of writing has left. This and the next are for the one process that writes.
void remove_rest_of_a_kill(const std::filesystem::path& out);

/// The log, cut back to `step`, with the memory limit that the run has now. The rest of a kill is removed.
RunLog resume_log(const TrainConfig& config, int64_t step);

/// As it was measured after `step`, the last one of a run: it is in the log before the snapshot is made.
std::optional<double> logged_validation_loss(const std::filesystem::path& out, int64_t step);

}  // namespace snug::detail
