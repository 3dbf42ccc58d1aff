#pragma once
// ZipArchive: the records of a zip file without compression, as torch writes zip files. The class uses no torch, so
// tests run without torch. Records share no bytes and no record is compressed, so all records together are no larger
// than the file.
//
//   file = records, each with a header of its own; the directory; its end, which says where it begins
//
// Format: APPNOTE.TXT of PKWARE, 4.3; with the 64-bit fields of 4.5.3 for large files.

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/io/input_file.h"

namespace snug::detail {

class ZipArchive final {
 public:
  struct Record {
    int64_t offset = 0;  // the header's offset in the file
    int64_t size = 0;    // in bytes
    uint32_t crc32 = 0;
  };

  /// Reads the directory. Throws CorruptFile if the file is not such an archive, and Error if the file cannot be read.
  explicit ZipArchive(const std::filesystem::path& path);

  /// The names of all records, sorted, without the folder around all records.
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return records_.contains(name); }
  /// The record's size in bytes. Throws CorruptFile if the archive has no record `name`.
  int64_t size(const std::string& name) const { return find(name).size; }
  /// Fills `target`, of the record's size, with the record. Throws CorruptFile if the checksum differs.
  void read(const std::string& name, std::span<char> target) const;
  /// The record as text. Throws CorruptFile for a record of more than `limit` bytes.
  std::string text(const std::string& name, int64_t limit) const;

 private:
  const Record& find(const std::string& name) const;
  void read_directory(std::string_view directory, int64_t count);

  InputFile file_;
  std::map<std::string, Record> records_;
  int64_t data_end_ = 0;  // the directory's offset
};

}  // namespace snug::detail
