#include "program/datasets/data_files.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <system_error>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse_path(const fs::path& path, const std::string& what) {
  throw ConfigError(fmt::format("data: {} {}", path.string(), what));
}

int64_t size_of(const fs::path& path) {
  std::error_code reason;
  const uintmax_t size = fs::file_size(path, reason);
  if (reason) {
    refuse_path(path, fmt::format("cannot be read: {}", reason.message()));
  }
  return static_cast<int64_t>(size);
}

// All regular files below the folder, sorted by path, without empty files and files in `left_out`.
std::vector<fs::path> files_below(const fs::path& folder, const fs::path& left_out) {
  std::vector<fs::path> files;
  std::error_code reason;
  fs::recursive_directory_iterator entry(folder, reason);
  while (!reason && entry != fs::recursive_directory_iterator()) {
    if (entry->is_regular_file(reason) && size_of(entry->path()) > 0) {
      files.push_back(entry->path());
    }
    if (!left_out.empty() && entry->is_directory(reason) && fs::equivalent(entry->path(), left_out, reason)) {
      entry.disable_recursion_pending();
    }
    reason.clear();  // A dangling link is not a file, and not a reason to stop.
    entry.increment(reason);
  }
  if (reason) {
    refuse_path(folder, fmt::format("cannot be read: {}", reason.message()));
  }
  if (files.empty()) {
    refuse_path(folder, "is a folder without text or other data; give one that holds files");
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

std::vector<fs::path> data_files(const std::vector<fs::path>& paths, const fs::path& left_out) {
  std::vector<fs::path> files;
  for (const fs::path& path : paths) {
    std::error_code reason;
    const auto status = fs::status(path, reason);
    if (status.type() == fs::file_type::not_found) {
      refuse_path(path, "does not exist; check the path");
    }
    if (fs::is_directory(status)) {
      const auto below = files_below(path, left_out);
      files.insert(files.end(), below.begin(), below.end());
    } else if (!fs::is_regular_file(status)) {
      refuse_path(path, "is neither a file nor a folder");
    } else if (size_of(path) == 0) {
      refuse_path(path, "is empty; give a file with data");
    } else {
      files.push_back(path);
    }
  }
  return files;
}

}  // namespace snug::detail
