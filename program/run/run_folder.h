#pragma once
// The files of a run in the run's folder.

#include <cstdint>
#include <filesystem>
#include <optional>

#include "program/report/run_log.h"
#include "program/run/config.h"

namespace snug::detail {

/// Whether `out` has content, so that no run may begin in `out`. A folder of a run that was killed before the log
/// existed counts as empty.
bool holds_something(const std::filesystem::path& out);

/// Removes unfinished files of a kill. Only the one process that writes may call this function and the next two
/// functions, and not while a background thread writes a snapshot.
void remove_rest_of_a_kill(const std::filesystem::path& out);

/// The log, cut back to `step`. Unfinished files of a kill are removed.
RunLog cut_log(const TrainConfig& config, int64_t step);

/// The same, with the current values of the settings that may change.
RunLog resume_log(const TrainConfig& config, int64_t step);

/// The validation loss that was measured after `step`, the last step of a run: the loss is in the log before the
/// snapshot is made.
std::optional<double> logged_validation_loss(const std::filesystem::path& out, int64_t step);

}  // namespace snug::detail
