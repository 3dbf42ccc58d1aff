#pragma once
// CRC-32 (as in zlib, PNG and gzip) of written bytes, and of a file on the disk. It finds damage, not malice.

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

/// The checksum of the parts, one after the other.
Checksum checksum_of(std::span<const std::string_view> parts);
/// The checksum of two contents, one after the other.
Checksum joined(const Checksum& first, const Checksum& second);

/// The checksum of a whole file, read in blocks of 1 MiB. Throws Error if it cannot be read.
Checksum checksum_of_file(const std::filesystem::path& path);

}  // namespace snug::detail
