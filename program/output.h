#pragma once
// Output of long-running programs, which may lose readers: `| head` ends, a terminal is closed, a disk is full.

#include <cstdio>
#include <string_view>

namespace snug::cli {

/// Writes `text` to standard output or standard error at once. show never throws, and a failed write does not end the
/// program. If standard output cannot be written, show reports the error on standard error, once. A closed pipe needs
/// ignore_signal(SIGPIPE).
void show(std::FILE* file, std::string_view text);

}  // namespace snug::cli
