#pragma once
// Files without a name, for data that a process keeps outside of memory.

#include <filesystem>
#include <string_view>

namespace snug::detail {

/// The same directory as an absolute path, so a later change of the program's own directory has no effect. An empty
/// path has a different meaning in each use, and stays empty.
std::filesystem::path lasting(const std::filesystem::path& directory);

/// Makes a new file in `directory` for reading and writing. The file disappears when the file is closed, also by a
/// kill. Returns the descriptor, or -1 with errno if no file can be made. On a file system without O_TMPFILE, calls
/// open_and_unlink().
int open_unnamed(const std::filesystem::path& directory);

/// The start of the name that a file of open_and_unlink() has for an instant. A kill in the instant leaves the file
/// behind.
inline constexpr std::string_view kUnnamedPrefix = "snug-unnamed-";

/// Does the same as open_unnamed(), on any file system.
int open_and_unlink(const std::filesystem::path& directory);

}  // namespace snug::detail
