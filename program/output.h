#pragma once
// Output of programs that go on for long, which may lose their readers meanwhile: `| head` ends, a terminal is closed,
// a disk is full.

#include <cstdio>
#include <string_view>

namespace snug::cli {

/// Writes `text` to standard output or standard error, now. It never throws, and nothing ends for it: where standard
/// output cannot be written, standard error is told so, once. A closed pipe needs ignore_signal(SIGPIPE).
void show(std::FILE* file, std::string_view text);

}  // namespace snug::cli
