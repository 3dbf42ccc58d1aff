#pragma once
// The lines of a run log: settings, records and events as JSON. Programs use RunLog and read_run_log. run_log_parse.h
// reads the lines back.

#include <string>

#include "program/report/run_log.h"

namespace snug::detail {

/// "snug_run" in the first line: the version that a reader of the log must support.
inline constexpr int64_t kRunLogVersion = 1;

/// One line of JSON, without the line end. In strings that are not UTF-8, U+FFFD replaces the wrong bytes.
std::string settings_line(const LogValues& settings);
std::string record_line(const StepRecord& record);
std::string event_line(const RunEvent& event);

}  // namespace snug::detail
