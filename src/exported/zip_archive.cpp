#include "src/exported/zip_archive.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/io/checksum.h"

namespace snug::detail {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers of a zip file are read as they lie");

constexpr int64_t kEndSize = 22, kEnd64LocatorSize = 20, kEnd64Size = 56, kEntrySize = 46, kHeaderSize = 30;
constexpr uint32_t kIn64Bits = 0xFFFFFFFF;  // stands for a number that needs more than 32 bits

// Reads a number of the directory, which may be cut short.
template <class T>
T number_at(std::string_view bytes, int64_t at) {
  if (at < 0 || at + static_cast<int64_t>(sizeof(T)) > static_cast<int64_t>(bytes.size())) {
    throw CorruptFile("the zip directory ends within an entry");
  }
  T result;
  std::memcpy(&result, bytes.data() + at, sizeof result);
  return result;
}

int64_t signed_size(uint64_t value) {
  if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    throw CorruptFile(fmt::format("the zip directory has a size or an offset of {} bytes", value));
  }
  return static_cast<int64_t>(value);
}

struct DirectoryPlace {
  int64_t offset, size, entries;
};

std::string bytes_of(const InputFile& file, int64_t offset, int64_t size) {
  std::string bytes(static_cast<size_t>(size), '\0');
  file.read_at(offset, bytes);
  return bytes;
}

// Reads the end of the directory. Large files have a second end with 64-bit numbers before the first, and the second
// end counts.
DirectoryPlace find_directory(const InputFile& file) {
  const int64_t tail_size = std::min(file.size(), kEndSize + kEnd64LocatorSize), at = tail_size - kEndSize;
  const std::string tail = bytes_of(file, file.size() - tail_size, tail_size);
  if (at < 0 || tail.compare(static_cast<size_t>(at), 4, "PK\5\6") != 0) {
    throw CorruptFile("it does not end as torch ends its zip files");
  }
  if (!tail.starts_with("PK\6\7")) {
    return {number_at<uint32_t>(tail, at + 16), number_at<uint32_t>(tail, at + 12), number_at<uint16_t>(tail, at + 10)};
  }
  const int64_t place = signed_size(number_at<uint64_t>(tail, 8));
  if (place > file.size() - kEnd64Size) {
    throw CorruptFile("the end of the zip directory lies outside the file");
  }
  const std::string end64 = bytes_of(file, place, kEnd64Size);
  if (!end64.starts_with("PK\6\6")) {
    throw CorruptFile("the zip directory has no end with 64-bit numbers where it is said to be");
  }
  return {signed_size(number_at<uint64_t>(end64, 48)), signed_size(number_at<uint64_t>(end64, 40)),
          signed_size(number_at<uint64_t>(end64, 32))};
}

// Replaces the numbers that did not fit into 32 bits by numbers of the entry's 64-bit field, which has only the missing
// numbers, in this order.
void read_64_bit_field(std::string_view extra, std::span<int64_t* const> numbers) {
  for (int64_t at = 0; at + 4 <= static_cast<int64_t>(extra.size());) {
    const int64_t size = number_at<uint16_t>(extra, at + 2);
    if (number_at<uint16_t>(extra, at) == 1) {
      int64_t next = at + 4;
      for (int64_t* number : numbers) {
        if (*number == kIn64Bits) {
          *number = signed_size(number_at<uint64_t>(extra, next));
          next += 8;
        }
      }
      return;
    }
    at += 4 + size;
  }
}

bool leaves_its_folder(std::string_view name) {
  return name.starts_with('/') || name.find('\\') != std::string_view::npos ||
         name.find('\0') != std::string_view::npos || ('/' + std::string(name) + '/').find("/../") != std::string::npos;
}

}  // namespace

ZipArchive::ZipArchive(const std::filesystem::path& path) : file_(path) {
  const auto [offset, size, entries] = find_directory(file_);
  if (size > file_.size() || offset > file_.size() - size || entries > size / kEntrySize) {
    throw CorruptFile(
        fmt::format("the zip directory is said to have {} entries in {} bytes at {}, but the file has {} bytes",
                    entries, size, offset, file_.size()));
  }
  data_end_ = offset;
  read_directory(bytes_of(file_, offset, size), entries);
}

void ZipArchive::read_directory(std::string_view directory, int64_t count) {
  int64_t at = 0, total = 0;
  std::string folder;
  for (int64_t i = 0; i < count; ++i) {
    if (directory.substr(static_cast<size_t>(std::min<int64_t>(at, std::ssize(directory))), 4) != "PK\1\2") {
      throw CorruptFile("an entry of the zip directory does not begin as one");
    }
    const int64_t name_size = number_at<uint16_t>(directory, at + 28),
                  extra_size = number_at<uint16_t>(directory, at + 30);
    Record record{.offset = number_at<uint32_t>(directory, at + 42),
                  .size = number_at<uint32_t>(directory, at + 24),
                  .crc32 = number_at<uint32_t>(directory, at + 16)};
    int64_t packed = number_at<uint32_t>(directory, at + 20);
    const int64_t next = at + kEntrySize + name_size + extra_size + number_at<uint16_t>(directory, at + 32);
    if (next > std::ssize(directory)) {
      throw CorruptFile("the zip directory ends within an entry");
    }
    std::string name(directory.substr(static_cast<size_t>(at + kEntrySize), static_cast<size_t>(name_size)));
    read_64_bit_field(
        directory.substr(static_cast<size_t>(at + kEntrySize + name_size), static_cast<size_t>(extra_size)),
        std::array{&record.size, &packed, &record.offset});
    if (leaves_its_folder(name)) {
      throw CorruptFile(fmt::format("the name '{}' in the zip directory leads out of it", name));
    }
    if ((number_at<uint16_t>(directory, at + 8) & 1) != 0 || number_at<uint16_t>(directory, at + 10) != 0 ||
        packed != record.size) {
      throw CorruptFile(fmt::format("'{}' is compressed or encrypted, which torch.export.save never does", name));
    }
    if (__builtin_add_overflow(total, record.size, &total) || total > data_end_ ||
        record.offset > data_end_ - kHeaderSize) {
      throw CorruptFile(fmt::format("'{}' is said to have {} bytes at {}, which the file has no room for", name,
                                    record.size, record.offset));
    }
    folder = i == 0 ? name.substr(0, name.find('/') + 1) : folder;
    if (folder.empty() || !name.starts_with(folder) || !records_.emplace(name.substr(folder.size()), record).second) {
      throw CorruptFile(fmt::format("'{}' is in the zip directory twice, or outside the folder '{}'", name, folder));
    }
    at = next;
  }
}

std::vector<std::string> ZipArchive::names() const {
  std::vector<std::string> result;
  for (const auto& [name, record] : records_) {
    result.push_back(name);
  }
  return result;
}

const ZipArchive::Record& ZipArchive::find(const std::string& name) const {
  const auto found = records_.find(name);
  if (found == records_.end()) {
    throw CorruptFile(fmt::format("it has no record '{}'", name));
  }
  return found->second;
}

void ZipArchive::read(const std::string& name, std::span<char> target) const {
  const Record& record = find(name);
  const std::string header = bytes_of(file_, record.offset, kHeaderSize);
  const int64_t begin = record.offset + kHeaderSize + number_at<uint16_t>(header, 26) + number_at<uint16_t>(header, 28);
  if (!header.starts_with("PK\3\4") || begin > data_end_ - record.size) {
    throw CorruptFile(fmt::format("the record '{}' does not lie where the zip directory says", name));
  }
  file_.read_at(begin, target);
  const std::string_view bytes(target.data(), target.size());
  if (checksum_of(std::span(&bytes, 1)).crc32 != record.crc32) {
    throw CorruptFile(fmt::format("the bytes of '{}' are not those that were written: their checksum differs", name));
  }
}

std::string ZipArchive::text(const std::string& name, int64_t limit) const {
  if (size(name) > limit) {
    throw CorruptFile(fmt::format("'{}' has {} bytes, more than the {} that are read of it", name, size(name), limit));
  }
  std::string result(static_cast<size_t>(size(name)), '\0');
  read(name, result);
  return result;
}

}  // namespace snug::detail
