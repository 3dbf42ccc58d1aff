#pragma once
// UnsyncedFileSystem: a real file system that does not wait for the disk, for tests that write hundreds of files.
// Tests of what a crash leaves behind inject their faults; waiting for a real disk would prove nothing more.
//
//   RunLog::resume(folder / "log", 4, unsynced_files());

#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/file_system.h"

namespace snug::testing {

class UnsyncedFileSystem final : public detail::FileSystem {
 public:
  void write_file(const Path& path, std::span<const std::string_view> parts, std::span<const int64_t> places) override {
    std::ofstream file(path, std::ios::binary | (places.empty() || !exists(path) ? std::ios::trunc : std::ios::in));
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!places.empty()) {
        file.seekp(places[i]);
      }
      file << parts[i];
    }
    file.close();
    if (!file) {
      throw Error(fmt::format("UnsyncedFileSystem.write_file: {}: failed", path.string()));
    }
  }
  void sync_directory(const Path&) override {}

  void rename(const Path& from, const Path& to) override { real().rename(from, to); }
  void create_directories(const Path& path) override { real().create_directories(path); }
  void remove_all(const Path& path) override { real().remove_all(path); }
  std::vector<std::string> list(const Path& directory) const override { return real().list(directory); }
  bool exists(const Path& path) const override { return real().exists(path); }
  std::string read_file(const Path& path) const override { return real().read_file(path); }
};

/// The one for all tests.
inline detail::FileSystem& unsynced_files() {
  static UnsyncedFileSystem files;
  return files;
}

}  // namespace snug::testing
