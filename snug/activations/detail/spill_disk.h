#pragma once
// SpillDisk: a file without a name, whose reads tell when they do not give what was written.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include <sys/types.h>
#include <unistd.h>

namespace snug::detail {

/// The system calls, so that tests can fail each of them. Each behaves as the POSIX function of its name: -1 and errno on failure, and less
/// than `size` may be moved.
class SpillCalls {
 public:
  virtual ~SpillCalls() = default;
  virtual ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
    return ::pwrite(file, data, size, offset);
  }
  virtual ssize_t pread(int file, void* data, size_t size, off_t offset) { return ::pread(file, data, size, offset); }
  virtual int ftruncate(int file, off_t size) { return ::ftruncate(file, size); }

  static SpillCalls& real() {
    static SpillCalls calls;
    return calls;
  }
};

/// The system's temporary directory if `directory` is empty. Throws Error if there is none.
std::filesystem::path spill_folder(const std::filesystem::path& directory);

/// Any thread may use it. What fails is told in words that name the file and the reason; empty: nothing failed.
class SpillDisk final {
 public:
  /// Throws Error if there can be no file in spill_folder(directory).
  SpillDisk(const std::filesystem::path& directory, SpillCalls& calls);
  ~SpillDisk();
  SpillDisk(const SpillDisk&) = delete;
  SpillDisk& operator=(const SpillDisk&) = delete;

  /// Also gives the sum that read() will need.
  std::string write(const void* data, int64_t bytes, int64_t offset, uint64_t& sum);
  std::string read(void* data, int64_t bytes, int64_t offset, uint64_t sum);
  /// Cuts off what lies behind `size`. If it cannot, nothing is lost but room.
  void shorten(int64_t size);

 private:
  std::string failure(const char* what, int64_t bytes, int error) const;

  SpillCalls& calls_;
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace snug::detail
