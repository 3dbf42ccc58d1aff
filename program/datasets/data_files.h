#pragma once
// The files of a data set that consists of files and folders.

#include <filesystem>
#include <vector>

namespace snug::detail {

/// The files in the given order. A folder stands for all regular files in the folder and below, sorted by path, without
/// empty files and files in `left_out`. Throws ConfigError, naming the path, if the path is missing, unreadable, an
/// empty file or a folder without files.
std::vector<std::filesystem::path> data_files(const std::vector<std::filesystem::path>& paths,
                                              const std::filesystem::path& left_out);

}  // namespace snug::detail
