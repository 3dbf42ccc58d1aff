#pragma once
// Words for a shell.

#include <string>

namespace snug::cli {

/// The word as a shell reads it back: in quotes where it needs them.
std::string shell_quoted(const std::string& word);

}  // namespace snug::cli
