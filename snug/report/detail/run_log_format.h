#pragma once
// The lines of a run log: how settings, records and events are spelled as JSON, and read back. Internal to report:
// programs use RunLog and read_run_log.

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "snug/report/run_log.h"

namespace snug::detail {

/// "snug_run" in the first line: what a program that reads the log must understand.
inline constexpr int64_t kRunLogVersion = 1;

/// Each one line of JSON, without the line end. Strings that are not UTF-8 are mended with U+FFFD.
std::string settings_line(const LogValues& settings);
std::string record_line(const StepRecord& record);
std::string event_line(const RunEvent& event);

/// One line of a log: its text without the line end (a view into the content), and what it says.
struct LogLine {
  std::string_view text;
  std::variant<LogValues, StepRecord, RunEvent> entry;
};

/// All complete lines of a log, of which the first and no other holds settings. What follows the last line end was
/// torn and is left out. Throws CorruptFile, with `file` and the number of the line.
std::vector<LogLine> parse_run_log(std::string_view content, std::string_view file);

}  // namespace snug::detail
