#include "src/core/spill_disk.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/bytes_hash.h"
#include "src/core/unnamed_file.h"

namespace snug::detail {
namespace {

// Two failures beside the system's errors: the file ended too early, or the bytes differ from the written bytes.
constexpr int kTooShort = -1;
constexpr int kOtherBytes = -2;

std::string reason_of(int error) {
  switch (error) {
    case kTooShort:
      return "the file is shorter than what was written to it";
    case kOtherBytes:
      return "the bytes are not those that were stored: the disk has lost them, or the tensor was written behind "
             "autograd's back";
    default:
      return fmt::format("{} (errno {})", std::generic_category().message(error), error);
  }
}

// Moves all `size` bytes, by several calls if necessary, because a call may move fewer bytes. Returns 0, or the error.
template <class Call>
int repeat(size_t size, int if_nothing_moves, Call&& call) {
  constexpr size_t kMost = size_t{1} << 30;  // Linux moves at most 2 GiB at a time
  for (size_t moved = 0; moved < size;) {
    const ssize_t now = call(moved, std::min(kMost, size - moved));
    if (now < 0 && errno != EINTR) {
      return errno;
    }
    if (now == 0) {
      return if_nothing_moves;
    }
    moved += now < 0 ? 0 : static_cast<size_t>(now);
  }
  return 0;
}

}  // namespace

std::filesystem::path spill_folder(const std::filesystem::path& directory) {
  if (!directory.empty()) {
    return directory;
  }
  std::error_code error;
  auto folder = std::filesystem::temp_directory_path(error);
  if (error) {
    throw Error(fmt::format("offload: the system's temporary directory cannot be used: {}; give a directory on a disk",
                            error.message()));
  }
  return folder;
}

SpillDisk::SpillDisk(const std::filesystem::path& directory, SpillCalls& calls) : calls_(calls) {
  folder_ = spill_folder(directory).string();
  descriptor_ = open_unnamed(folder_);
  if (descriptor_ < 0) {
    const int error = errno;
    throw Error(fmt::format("offload: cannot make a file in '{}': {}; give a directory that can be written to", folder_,
                            reason_of(error)));
  }
}

SpillDisk::~SpillDisk() { ::close(descriptor_); }

std::string SpillDisk::write(const void* data, int64_t bytes, int64_t offset, uint64_t& sum) {
  sum = bytes_hash(data, static_cast<size_t>(bytes));
  const int error = repeat(static_cast<size_t>(bytes), ENOSPC, [&](size_t from, size_t size) {
    return calls_.pwrite(descriptor_, static_cast<const char*>(data) + from, size,
                         static_cast<off_t>(offset) + static_cast<off_t>(from));
  });
  return failure("write {} to", bytes, error);
}

std::string SpillDisk::read(void* data, int64_t bytes, int64_t offset, uint64_t sum) {
  int error = repeat(static_cast<size_t>(bytes), kTooShort, [&](size_t from, size_t size) {
    return calls_.pread(descriptor_, static_cast<char*>(data) + from, size,
                        static_cast<off_t>(offset) + static_cast<off_t>(from));
  });
  // A disk may fail after accepting the bytes, and then return other bytes.
  if (error == 0 && bytes_hash(data, static_cast<size_t>(bytes)) != sum) {
    error = kOtherBytes;
  }
  return failure("read {} back from", bytes, error);
}

std::string SpillDisk::reserve(int64_t bytes, int64_t offset) {
  const int error =
      bytes == 0 ? 0 : calls_.posix_fallocate(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  return failure("find room for {} in", bytes, error);
}

void SpillDisk::shorten(int64_t size) { (void)calls_.ftruncate(descriptor_, static_cast<off_t>(size)); }

std::string SpillDisk::failure(const char* what, int64_t bytes, int error) const {
  if (error == 0) {
    return {};
  }
  return fmt::format("cannot {} {}: {}", fmt::format(fmt::runtime(what), Bytes(bytes).str()), description(),
                     reason_of(error));
}

std::string SpillDisk::description() const { return fmt::format("the spill file in '{}'", folder_); }

}  // namespace snug::detail
