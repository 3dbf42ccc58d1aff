#pragma once
// Files without a name, for what a process keeps outside its memory.

#include <filesystem>
#include <string_view>

namespace snug::detail {

/// A new file in `directory`, to be read and written. It is gone when it is closed, also by a kill. Returns its
/// descriptor; -1, and errno, where there can be none. On a file system without O_TMPFILE: open_and_unlink().
int open_unnamed(const std::filesystem::path& directory);

/// The same. For an instant it has a name that begins so, and a kill in that instant leaves it behind.
inline constexpr std::string_view kUnnamedPrefix = "snug-unnamed-";
int open_and_unlink(const std::filesystem::path& directory);

}  // namespace snug::detail
