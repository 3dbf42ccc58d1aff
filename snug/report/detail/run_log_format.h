#pragma once
// The lines of a run log: settings, records and events as JSON, and back. Internal to report: programs use RunLog and
// read_run_log.

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "snug/report/run_log.h"

namespace snug::detail {

/// "snug_run" in the first line: the version that a program must know to read the log.
inline constexpr int64_t kRunLogVersion = 1;

/// One line of JSON, without the line end. In strings that are not UTF-8, U+FFFD replaces the wrong bytes.
std::string settings_line(const LogValues& settings);
std::string record_line(const StepRecord& record);
std::string event_line(const RunEvent& event);

/// One line of a log: its text without the line end (a view into the content), and its parsed content.
struct LogLine {
  std::string_view text;
  std::variant<LogValues, StepRecord, RunEvent> entry;
};

/// All complete lines of a log. The first line, and no other, must hold settings. A torn line after the last line end
/// is left out. Throws CorruptFile, with `file` and the number of the line.
std::vector<LogLine> parse_run_log(std::string_view content, std::string_view file);

}  // namespace snug::detail
