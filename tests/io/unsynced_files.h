#pragma once
// UnsyncedFiles: the real file system without waiting for the disk. Tests of what a crash leaves
// behind inject their faults; waiting thousands of times for a real disk would prove nothing more.

#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "snug/core/error.h"
#include "snug/core/file_system.h"

namespace snug::testing {

class UnsyncedFiles final : public FileSystem {
 public:
  void write_file(const Path& path, std::span<const std::string_view> parts) override {
    std::ofstream file(path, std::ios::binary);
    for (const std::string_view part : parts) {
      file.write(part.data(), std::ssize(part));
    }
    if (!file.flush()) {
      throw Error("UnsyncedFiles: cannot write " + path.string());
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
inline FileSystem& unsynced_files() {
  static UnsyncedFiles files;
  return files;
}

}  // namespace snug::testing
