#pragma once
// Text from files and the command line, as a terminal may be shown it.

#include <string>
#include <string_view>

namespace snug::cli {

/// `text` in one line, with \xNN in the place of each byte that is no part of a printable UTF-8 character: control
/// characters, which a terminal would obey, and bytes that are no UTF-8.
std::string printable(std::string_view text);

}  // namespace snug::cli
