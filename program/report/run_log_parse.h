#pragma once
// The lines of a run log, read back from JSON.

#include <string_view>
#include <variant>
#include <vector>

#include "program/report/run_log.h"

namespace snug::detail {

/// One line of a log: the text without the line end (a view into the content), and the parsed content.
struct LogLine {
  std::string_view text;
  std::variant<LogValues, StepRecord, RunEvent> entry;
};

/// All complete lines of a log. The first line, and no other, must hold settings. A torn line after the last line end
/// is left out. Throws CorruptFile, with `file` and the number of the line.
std::vector<LogLine> parse_run_log(std::string_view content, std::string_view file);

}  // namespace snug::detail
