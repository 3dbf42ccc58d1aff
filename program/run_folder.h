#pragma once
// The folder of a run: the folder's option, reading the folder, and writing the report.

#include <filesystem>
#include <string>

#include <CLI/CLI.hpp>

#include "program/models/gpt.h"
#include "program/report/run_log.h"

namespace snug::cli {

/// Adds the folder of a run to the command, as DIR or as --run DIR. `run` has the default, and must outlive the
/// command.
void add_run(CLI::App& command, std::string& run);

/// The command with which a user resumes the run in `out`, quoted for a shell where quotes are necessary.
std::string resume_command(const std::filesystem::path& out);

/// The run's log. Throws ConfigError if `out` has no run.
RunHistory read_run(const std::filesystem::path& out);

/// The noun for the items in the records of a run, in the plural.
std::string item_of(const RunHistory& run);

/// The trained model of a run. Throws ConfigError if the run has no model yet.
Gpt load_model(const std::filesystem::path& out);

std::filesystem::path report_path(const std::filesystem::path& out);
std::filesystem::path sample_path(const std::filesystem::path& out);

/// Writes the report page with `sample`, or, if `sample` is empty, with the sample in the folder.
void write_report(const std::filesystem::path& out, std::string sample);

}  // namespace snug::cli
