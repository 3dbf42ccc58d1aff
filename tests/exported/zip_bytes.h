#pragma once
// Zip files byte by byte, also such as nobody should write.

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/io/checksum.h"

namespace snug::testing {

template <class T>
std::string bytes(T value) {
  std::string result(sizeof value, '\0');
  std::memcpy(result.data(), &value, sizeof value);
  return result;
}

struct ZipRecord {
  std::string name, data;
  uint16_t flags = 0x808, method = 0;
  uint32_t packed = 0;            // 0: as many as the data has
  std::string extra = {};         // in the directory
  uint32_t size = 0, offset = 0;  // as the directory says it; 0: as it is
};

/// The records one after the other, the directory, and its end.
inline std::string zip_of(const std::vector<ZipRecord>& records) {
  std::string file, directory;
  for (const ZipRecord& one : records) {
    const std::string_view data = one.data;
    const auto size = static_cast<uint32_t>(data.size()), crc = detail::checksum_of(std::span(&data, 1)).crc32;
    const auto name_size = static_cast<uint16_t>(one.name.size());
    directory += "PK\1\2" + bytes<uint32_t>(0) + bytes(one.flags) + bytes(one.method) + bytes<uint32_t>(0) +
                 bytes(crc) + bytes(one.packed > 0 ? one.packed : size) + bytes(one.size > 0 ? one.size : size) +
                 bytes(name_size) + bytes(static_cast<uint16_t>(one.extra.size())) + bytes<uint16_t>(0) +
                 std::string(8, '\0') + bytes(one.offset > 0 ? one.offset : static_cast<uint32_t>(file.size())) +
                 one.name + one.extra;
    file += "PK\3\4" + std::string(22, '\0') + bytes(name_size) + bytes<uint16_t>(0) + one.name + one.data;
  }
  const auto count = static_cast<uint16_t>(records.size());
  return file + directory + "PK\5\6" + bytes<uint32_t>(0) + bytes(count) + bytes(count) +
         bytes(static_cast<uint32_t>(directory.size())) + bytes(static_cast<uint32_t>(file.size())) +
         bytes<uint16_t>(0);
}

}  // namespace snug::testing
