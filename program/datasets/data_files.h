#pragma once
// The files of a data set that is given by files and folders.

#include <filesystem>
#include <vector>

namespace snug::detail {

/// The files in the given order; of a folder all regular files in it and below, sorted by path, without empty ones and
/// those in `left_out`. Throws ConfigError, naming the path, if it is missing, unreadable, an empty file or a folder
/// without files.
std::vector<std::filesystem::path> data_files(const std::vector<std::filesystem::path>& paths,
                                              const std::filesystem::path& left_out);

}  // namespace snug::detail
