#pragma once
// FailingFileSystem: a real file system whose k-th changing operation fails, for tests of what must survive a fault.
//
//   FailingFileSystem files({.fail_at = 3});                       // the third write_file, rename ... throws Error
//   FailingFileSystem files({.fail_at = 3, .then_dead = true});    // and so does all that follows: the process died
//
// A write_file that fails writes the first half of its bytes before it throws.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/file_system.h"

namespace snug::testing {

struct FailingFileSystemOptions {
  int64_t fail_at = 0;     ///< which changing operation fails, from 1; 0: none, to count them with operations()
  bool then_dead = false;  ///< every later changing operation fails as well, and changes nothing
};

class FailingFileSystem final : public detail::FileSystem {
 public:
  explicit FailingFileSystem(FailingFileSystemOptions options, detail::FileSystem& inner = real())
      : options_(options), inner_(inner) {}

  /// How many changing operations were asked for so far.
  int64_t operations() const { return operations_; }

  void write_file(const Path& path, std::span<const std::string_view> parts,
                  std::span<const int64_t> places = {}) override {
    if (fails()) {
      if (operations_ == options_.fail_at) {
        write_half(path, parts);
      }
      fail("write_file", path);
    }
    inner_.write_file(path, parts, places);
  }

  void rename(const Path& from, const Path& to) override {
    if (fails()) {
      fail("rename", from);
    }
    inner_.rename(from, to);
  }

  void sync_directory(const Path& path) override {
    if (fails()) {
      fail("sync_directory", path);
    }
    inner_.sync_directory(path);
  }

  void create_directories(const Path& path) override {
    if (fails()) {
      fail("create_directories", path);
    }
    inner_.create_directories(path);
  }

  void remove_all(const Path& path) override {
    if (fails()) {
      fail("remove_all", path);
    }
    inner_.remove_all(path);
  }

  std::vector<std::string> list(const Path& directory) const override { return inner_.list(directory); }
  bool exists(const Path& path) const override { return inner_.exists(path); }
  std::string read_file(const Path& path) const override { return inner_.read_file(path); }

 private:
  // Counts the operation and tells whether it is to fail.
  bool fails() {
    ++operations_;
    return operations_ == options_.fail_at ||
           (options_.then_dead && options_.fail_at > 0 && operations_ > options_.fail_at);
  }

  [[noreturn]] void fail(std::string_view operation, const Path& path) const {
    throw Error(fmt::format("FileSystem.{}: {}: fault {} injected by a test", operation, path.string(), operations_));
  }

  void write_half(const Path& path, std::span<const std::string_view> parts) {
    std::string content;
    for (const std::string_view part : parts) {
      content += part;
    }
    const std::string_view half = std::string_view(content).substr(0, content.size() / 2);
    inner_.write_file(path, std::span(&half, 1));
  }

  FailingFileSystemOptions options_;
  detail::FileSystem& inner_;
  int64_t operations_ = 0;
};

}  // namespace snug::testing
