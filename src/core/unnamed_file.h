#pragma once
// Files without a name, for what a process keeps outside its memory.

#include <filesystem>
#include <string_view>

namespace snug::detail {

/// The same directory, however the program changes its own later. An empty path, which means another place in each use,
/// stays empty.
std::filesystem::path lasting(const std::filesystem::path& directory);

/// A new file in `directory`, to be read and written. It is gone when it is closed, also by a kill. Returns its
/// descriptor; -1, and errno, where there can be none. On a file system without O_TMPFILE: open_and_unlink().
int open_unnamed(const std::filesystem::path& directory);

/// With it begins the name that a file of open_and_unlink() has for an instant. A kill in that instant leaves it
/// behind.
inline constexpr std::string_view kUnnamedPrefix = "snug-unnamed-";

/// The same as open_unnamed(), on any file system.
int open_and_unlink(const std::filesystem::path& directory);

}  // namespace snug::detail
