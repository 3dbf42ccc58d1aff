#pragma once
// ForwardingFileSystem: the real one, of which a test overrides what it wants otherwise.

#include <string>
#include <string_view>
#include <vector>

#include "src/core/file_system.h"

namespace snug::testing {

class ForwardingFileSystem : public detail::FileSystem {
 public:
  explicit ForwardingFileSystem(detail::FileSystem& inner = real()) : inner_(inner) {}

  void write_file(const Path& path, std::span<const std::string_view> parts, std::span<const int64_t> places) override {
    inner_.write_file(path, parts, places);
  }
  void rename(const Path& from, const Path& to) override { inner_.rename(from, to); }
  void sync_directory(const Path& path) override { inner_.sync_directory(path); }
  void create_directories(const Path& path) override { inner_.create_directories(path); }
  void remove_all(const Path& path) override { inner_.remove_all(path); }
  std::vector<std::string> list(const Path& directory) const override { return inner_.list(directory); }
  bool exists(const Path& path) const override { return inner_.exists(path); }
  std::string read_file(const Path& path) const override { return inner_.read_file(path); }

 private:
  detail::FileSystem& inner_;
};

}  // namespace snug::testing
