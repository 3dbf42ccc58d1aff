#include "src/core/file_system.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <random>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "snug/core.h"
#include "src/core/fnv1a.h"
#include "src/core/system_reason.h"

namespace snug::detail {
namespace {

using Path = FileSystem::Path;

[[noreturn]] void fail(std::string_view operation, const Path& path, const std::error_code& reason) {
  throw Error(fmt::format("FileSystem.{}: {}: {}", operation, path.string(), system_reason(reason)));
}

[[noreturn]] void fail_with_errno(std::string_view operation, const Path& path) {
  fail(operation, path, std::error_code(errno, std::generic_category()));
}

Path folder_of(const Path& path) { return path.has_parent_path() ? path.parent_path() : "."; }

constexpr const char* kUnfinished = ".tmp";
constexpr size_t kRandomSize = 17;  // the size of a hyphen and 16 digits

// The start of the names of unfinished files of `path`: the name of `path` or, if the name leaves no room, the start of
// the name and a hash of the whole name.
std::string unfinished_start(const Path& path) {
  std::string name = path.filename().string();
  const size_t room = NAME_MAX - std::string_view(kUnfinished).size() - kRandomSize;
  if (name.size() > room && name.size() <= NAME_MAX) {  // a longer name is not a valid name
    const std::string hash = fmt::format("-{:08x}", detail::fnv1a(name));
    size_t kept = room - hash.size();
    while (kept > 0 && (static_cast<unsigned char>(name[kept]) & 0xC0U) == 0x80U) {  // inside a UTF-8 character
      --kept;
    }
    name = name.substr(0, kept) + hash;
  }
  return name + kUnfinished;
}

// An open file that is closed at the end of the scope.
class [[nodiscard]] Descriptor final {
 public:
  Descriptor(std::string_view operation, const Path& path, int flags) : operation_(operation), path_(path) {
    do {
      number_ = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
    } while (number_ < 0 && errno == EINTR);
    if (number_ < 0) {
      fail_with_errno(operation_, path_);
    }
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) {
      ::close(number_);
    }
  }

  void go_to(int64_t place) {
    if (::lseek(number_, place, SEEK_SET) < 0) {
      fail_with_errno(operation_, path_);
    }
  }

  // A single ::write() may accept fewer bytes than given: at most 2 GiB on Linux, and fewer when the disk gets full.
  void write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t written = ::write(number_, bytes.data(), bytes.size());
      if (written < 0 && errno != EINTR) {
        fail_with_errno(operation_, path_);
      }
      bytes.remove_prefix(written < 0 ? 0 : static_cast<size_t>(written));
    }
  }

  void sync() {
    if (::fsync(number_) != 0) {
      fail_with_errno(operation_, path_);
    }
  }

  size_t read(char* buffer, size_t size) {
    ssize_t got = 0;
    do {
      got = ::read(number_, buffer, size);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
      fail_with_errno(operation_, path_);
    }
    return static_cast<size_t>(got);
  }

  // Some file systems (NFS, quotas) report only in ::close() that the content did not arrive.
  void close() {
    if (::close(std::exchange(number_, -1)) != 0) {
      fail_with_errno(operation_, path_);
    }
  }

 private:
  std::string_view operation_;
  const Path& path_;
  int number_ = -1;
};

class RealFileSystem final : public FileSystem {
 public:
  void write_file(const Path& path, std::span<const std::string_view> parts, std::span<const int64_t> places) override {
    Descriptor file("write_file", path, O_WRONLY | (places.empty() ? O_CREAT | O_TRUNC : 0) | O_NOFOLLOW);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!places.empty()) {
        file.go_to(places[i]);
      }
      file.write(parts[i]);
    }
    file.sync();
    file.close();
  }

  void rename(const Path& from, const Path& to) override {
    if (std::rename(from.c_str(), to.c_str()) != 0) {
      const std::error_code reason(errno, std::generic_category());
      throw Error(fmt::format("FileSystem.rename: {} to {}: {}", from.string(), to.string(), reason.message()));
    }
  }

  void sync_directory(const Path& path) override {
    Descriptor directory("sync_directory", path, O_RDONLY | O_DIRECTORY);
    directory.sync();
  }

  void create_directories(const Path& path) override {
    std::error_code reason;
    std::vector<Path> made;
    for (Path each = path; !each.empty() && !std::filesystem::exists(each, reason); each = each.parent_path()) {
      made.push_back(each);
    }
    std::filesystem::create_directories(path, reason);
    if (reason) {
      fail("create_directories", path, reason);
    }
    for (const Path& each : made) {
      // sync_directory opens the folder. Opening needs more rights than making a folder inside.
      if (::access(folder_of(each).c_str(), R_OK) == 0) {
        sync_directory(folder_of(each));
      }
    }
  }

  void remove_all(const Path& path) override {
    std::error_code reason;
    std::filesystem::remove_all(path, reason);
    if (reason) {
      fail("remove_all", path, reason);
    }
  }

  std::vector<std::string> list(const Path& directory) const override {
    std::error_code reason;
    std::vector<std::string> names;
    std::filesystem::directory_iterator entry(directory, reason);
    while (!reason && entry != std::filesystem::directory_iterator()) {
      names.push_back(entry->path().filename().string());
      entry.increment(reason);
    }
    if (reason) {
      fail("list", directory, reason);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  bool exists(const Path& path) const override {
    std::error_code reason;
    const auto status = std::filesystem::symlink_status(path, reason);
    if (status.type() == std::filesystem::file_type::none) {
      fail("exists", path, reason);
    }
    return status.type() != std::filesystem::file_type::not_found;
  }

  std::string read_file(const Path& path) const override {
    Descriptor file("read_file", path, O_RDONLY);
    std::string content;
    size_t filled = 0;
    do {
      if (filled == content.size()) {
        content.resize(std::max<size_t>(size_t{1} << 16, 2 * content.size()));
      }
      const size_t got = file.read(content.data() + filled, content.size() - filled);
      if (got == 0) {
        break;
      }
      filled += got;
    } while (true);
    content.resize(filled);
    return content;
  }
};

}  // namespace

FileSystem& FileSystem::real() {
  static RealFileSystem files;
  return files;
}

FileSystem::Path unfinished_path(const FileSystem::Path& path, int64_t number) {
  return path.parent_path() / fmt::format("{}-{:016x}", unfinished_start(path), static_cast<uint64_t>(number));
}

int64_t random_number() {
  std::random_device random;
  return static_cast<int64_t>(uint64_t{random()} << 32U | random());
}

void replace_file(const FileSystem::Path& path, const FileSystem::Path& unfinished, const std::function<void()>& write,
                  FileSystem& files) {
  try {
    write();
    files.rename(unfinished, path);
  } catch (...) {
    try {
      files.remove_all(unfinished);
    } catch (const Error&) {  // The first error is the error to report.
    }
    throw;
  }
  files.sync_directory(folder_of(path));
}

void replace_file(const FileSystem::Path& path, std::span<const std::string_view> parts, FileSystem& files) {
  const FileSystem::Path unfinished = unfinished_path(path, random_number());
  replace_file(path, unfinished, [&] { files.write_file(unfinished, parts); }, files);
}

void replace_file(const FileSystem::Path& path, std::string_view text, FileSystem& files) {
  replace_file(path, std::span(&text, 1), files);
}

bool is_unfinished(const FileSystem::Path& file, const FileSystem::Path& path) {
  const std::string name = file.filename().string(), start = unfinished_start(path);
  if (!name.starts_with(start)) {
    return false;
  }
  const std::string_view rest = std::string_view(name).substr(start.size());
  const auto is_digit = [](char c) { return std::string_view("0123456789abcdef").find(c) != std::string_view::npos; };
  return rest.empty() ||  // named by a version before 0.1
         (rest.size() == kRandomSize && rest[0] == '-' && std::all_of(rest.begin() + 1, rest.end(), is_digit));
}

void remove_unfinished(const FileSystem::Path& path, FileSystem& files) {
  const FileSystem::Path folder = folder_of(path);
  if (!files.exists(folder)) {
    return;
  }
  for (const std::string& name : files.list(folder)) {
    if (is_unfinished(name, path)) {
      files.remove_all(folder / name);
    }
  }
}

}  // namespace snug::detail
