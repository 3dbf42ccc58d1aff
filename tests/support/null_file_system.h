#pragma once
// NullFileSystem: a file system that sees nothing and does nothing, for tests that replace one operation.
//
//   class Redirecting final : public NullFileSystem {
//     void rename(const Path&, const Path& to) override { std::filesystem::create_symlink("/dev/full", to); }
//   } files;

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/core/file_system.h"

namespace snug::testing {

class NullFileSystem : public detail::FileSystem {
 public:
  void write_file(const Path&, std::span<const std::string_view>, std::span<const int64_t>) override {}
  void rename(const Path&, const Path&) override {}
  void sync_directory(const Path&) override {}
  void create_directories(const Path&) override {}
  void remove_all(const Path&) override {}
  std::vector<std::string> list(const Path&) const override { return {}; }
  bool exists(const Path&) const override { return false; }
  std::string read_file(const Path&) const override { return {}; }
};

}  // namespace snug::testing
