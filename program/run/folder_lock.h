#pragma once
// FolderLock: one process at a time trains in a run folder.

#include <filesystem>

namespace snug::detail {

/// Holds the file `lock` in a run folder, until it is destroyed or its process ends, however it ends
/// (flock(2)). The file stays; it says who held it last: "process 4711 on host". Where the file system has no locks, it
/// holds nothing.
class [[nodiscard]] FolderLock {
 public:
  /// Throws ConfigError, which names the owner, if another process, or another FolderLock, holds it; Error if the file
  /// cannot be written, or the folder is not there.
  explicit FolderLock(const std::filesystem::path& out);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  static std::filesystem::path file(const std::filesystem::path& out) { return out / "lock"; }

 private:
  int descriptor_;
};

}  // namespace snug::detail
