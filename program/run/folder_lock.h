#pragma once
// FolderLock: one process at a time trains in a run folder.

#include <filesystem>

namespace snug::detail {

/// Locks the file `lock` in a run folder, until the object is destroyed or the process ends in any way (flock(2)). The
/// file stays and names the last owner: "process 4711 on host". On a file system without locks, a FolderLock locks
/// nothing.
class [[nodiscard]] FolderLock {
 public:
  /// Throws ConfigError, which names the owner, if another process, or another FolderLock, has the lock. Throws Error
  /// if the file cannot be written, or the folder does not exist.
  explicit FolderLock(const std::filesystem::path& out);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  static std::filesystem::path file(const std::filesystem::path& out) { return out / "lock"; }

 private:
  int descriptor_;
};

}  // namespace snug::detail
