#pragma once
// Words for a shell.

#include <string>

namespace snug::cli {

/// The word in a form that a shell reads back, with quotes where quotes are necessary.
std::string shell_quoted(const std::string& word);

}  // namespace snug::cli
