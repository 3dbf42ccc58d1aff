#pragma once
// SpillDisk: bytes in a file without a name. A read reports an error if the read does not return the written bytes.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

namespace snug::detail {

/// The system calls, as an interface, so tests can make each call fail. Each member behaves as the POSIX function of
/// the same name: a failed call returns -1 and sets errno, and a call may move less than `size`.
class SpillCalls {
 public:
  virtual ~SpillCalls() = default;
  virtual ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
    return ::pwrite(file, data, size, offset);
  }
  virtual ssize_t pread(int file, void* data, size_t size, off_t offset) { return ::pread(file, data, size, offset); }
  virtual int ftruncate(int file, off_t size) { return ::ftruncate(file, size); }
  /// Returns the error itself, or 0.
  virtual int posix_fallocate(int file, off_t offset, off_t size) { return ::posix_fallocate(file, offset, size); }

  static SpillCalls& real() {
    static SpillCalls calls;
    return calls;
  }
};

/// `directory`, or the system's temporary directory if `directory` is empty. Throws Error if the system has no
/// temporary directory.
std::filesystem::path spill_folder(const std::filesystem::path& directory);

/// Any thread may use a SpillDisk. Methods that return a text name the folder and the reason of a failure; the text is
/// empty if nothing failed.
class SpillDisk final {
 public:
  /// Throws Error if no file can be made in spill_folder(directory).
  SpillDisk(const std::filesystem::path& directory, SpillCalls& calls);
  ~SpillDisk();
  SpillDisk(const SpillDisk&) = delete;
  SpillDisk& operator=(const SpillDisk&) = delete;

  /// Writes `data`, and returns in `sum` the checksum that read() will need.
  std::string write(const void* data, int64_t bytes, int64_t offset, uint64_t& sum);
  std::string read(void* data, int64_t bytes, int64_t offset, uint64_t sum);
  /// Takes room on the disk, so a later write to the reserved bytes cannot find the disk full.
  std::string reserve(int64_t bytes, int64_t offset);
  /// Cuts the file off behind `size`. A failure costs only disk space.
  void shorten(int64_t size);

  int descriptor() const { return descriptor_; }
  /// A description of the file for messages: the file has no name, so the description names the folder.
  std::string description() const;

 private:
  std::string failure(const char* what, int64_t bytes, int error) const;

  SpillCalls& calls_;
  std::string folder_;
  int descriptor_ = -1;
};

}  // namespace snug::detail
