#pragma once
// Text from files and the command line, made safe for a terminal.

#include <string>
#include <string_view>

namespace snug::cli {

/// `text` in one line, with \xNN instead of each byte outside printable UTF-8 characters: control characters, which a
/// terminal obeys, and bytes that are not UTF-8.
std::string printable(std::string_view text);

}  // namespace snug::cli
