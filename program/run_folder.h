#pragma once
// The folder of a run: its option, reading it, and writing its report.

#include <filesystem>
#include <string>

#include <CLI/CLI.hpp>

#include "program/models/gpt.h"
#include "program/report/run_log.h"

namespace snug::cli {

/// The folder of a run, as DIR or as --run DIR. `run` has the default, and must outlive the command.
void add_run(CLI::App& command, std::string& run);

/// What a person types to go on with the run in `out`, quoted where a shell wants it.
std::string resume_command(const std::filesystem::path& out);

/// The run's log. Throws ConfigError if there is no run in `out`.
RunHistory read_run(const std::filesystem::path& out);

/// What the records of a run count as items, in the plural.
std::string item_of(const RunHistory& run);

/// The trained model of a run. Throws ConfigError if it has none yet.
Gpt load_model(const std::filesystem::path& out);

std::filesystem::path report_path(const std::filesystem::path& out);
std::filesystem::path sample_path(const std::filesystem::path& out);

/// Writes the report page, with `sample`, or with the sample that lies in the folder if that is empty.
void write_report(const std::filesystem::path& out, std::string sample);

}  // namespace snug::cli
