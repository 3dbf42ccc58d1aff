#pragma once
// FileSystem: the file operations of snapshots and logs, as an interface. Tests replace the interface to fail any
// single operation.
//
//   FileSystem& disk = FileSystem::real();
//   disk.write_file(folder / "model.tmp", std::array<std::string_view, 2>{header, tensors});  // safe on the disk,
//   disk.rename(folder / "model.tmp", folder / "model");                                      // whole or not at all,
//   disk.sync_directory(folder);                                                              // and under its name
//
// Every operation that fails throws snug::Error with the path and the operating system's reason.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace snug::detail {

class FileSystem {
 public:
  /// A path on this system, as in the standard library.
  using Path = std::filesystem::path;

  virtual ~FileSystem() = default;

  /// Creates or truncates the file, writes all parts one after the other, and returns when all parts are on the disk
  /// (fsync). If write_file throws, a part of the content may be left behind. If the name is a link, the link is not
  /// followed. With `places`, the offset of each part, the file must exist, and keeps its other bytes.
  virtual void write_file(const Path& path, std::span<const std::string_view> parts,
                          std::span<const int64_t> places = {}) = 0;

  /// Gives `from` the name `to`, atomically replacing a file named `to`.
  virtual void rename(const Path& from, const Path& to) = 0;

  /// Makes the names in this directory durable: the names of entries created, renamed and removed.
  virtual void sync_directory(const Path& path) = 0;

  /// Creates the directory and its parents, and makes their names durable. A directory that exists already is not an
  /// error.
  virtual void create_directories(const Path& path) = 0;

  /// Removes the file, or the directory with its content. A file or directory that is absent is not an error.
  virtual void remove_all(const Path& path) = 0;

  /// The names (not paths) of the directory's entries, sorted.
  virtual std::vector<std::string> list(const Path& directory) const = 0;

  /// False only if nothing has this name. Throws if the answer cannot be found out.
  virtual bool exists(const Path& path) const = 0;

  /// The whole content of a file.
  virtual std::string read_file(const Path& path) const = 0;

  /// The file system of this computer (POSIX). The object has no state, so any thread may use the object.
  static FileSystem& real();
};

/// Writes the parts one after the other to a file, atomically: the file on the disk is the complete new file, or still
/// the earlier file. If replace_file throws, nothing has changed. Several callers may replace the same file at once;
/// the content of the last caller stays.
void replace_file(const FileSystem::Path& path, std::span<const std::string_view> parts,
                  FileSystem& files = FileSystem::real());
void replace_file(const FileSystem::Path& path, std::string_view text, FileSystem& files = FileSystem::real());
/// The same, and `write` writes the content to `unfinished`, an unfinished_path() of `path`.
void replace_file(const FileSystem::Path& path, const FileSystem::Path& unfinished, const std::function<void()>& write,
                  FileSystem& files);

/// The name of a file beside `path`. `number`: a random_number() for each file, because several callers may replace
/// `path` at once.
FileSystem::Path unfinished_path(const FileSystem::Path& path, int64_t number);
int64_t random_number();

/// Whether `file` is an unfinished_path() of `path`. replace_file first writes the unfinished file, and then
/// renames the file to `path`. A kill in between leaves the file behind.
bool is_unfinished(const FileSystem::Path& file, const FileSystem::Path& path);

/// Removes the unfinished files of `path`, if their directory exists. Nobody may replace `path` during the call.
void remove_unfinished(const FileSystem::Path& path, FileSystem& files = FileSystem::real());

}  // namespace snug::detail
