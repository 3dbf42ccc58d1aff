#pragma once
// CRC-32 (the one of zlib, PNG and gzip) of what is written, and of a file as it is on the disk:
// finds damage, not malice.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

namespace snug::detail {

struct Checksum {
  int64_t bytes = 0;
  uint32_t crc32 = 0;

  friend bool operator==(const Checksum&, const Checksum&) = default;
};

/// Of the parts, one after the other.
Checksum checksum_of(std::span<const std::string_view> parts);

/// Of a whole file, read in blocks of 1 MiB. Throws Error if it cannot be read.
Checksum checksum_of_file(const std::filesystem::path& path);

}  // namespace snug::detail
