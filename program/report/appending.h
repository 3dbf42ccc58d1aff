#pragma once
// Appending to logs: one write per piece, so that a kill leaves whole pieces. Internal to report.

#include <filesystem>
#include <string_view>

#include "snug/core.h"

namespace snug::detail {

/// "RunLog.write: run/log.jsonl: No space left on device"; `reason` is an errno.
Error system_error(std::string_view where, const std::filesystem::path& path, int reason);

/// Appends `bytes` with one write, or with more writes if the system takes fewer bytes at once. The bytes are handed to
/// the operating system when append_whole returns. Throws Error (disk full ...), naming `who`.write and the path of the
/// open file; bytes that were written are then removed again.
void append_whole(int file, std::string_view bytes, std::string_view who, const std::filesystem::path& path);

}  // namespace snug::detail
