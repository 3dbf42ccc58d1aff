#include "src/io/checksum.h"

#include <algorithm>
#include <string>

#include <zlib.h>

#include "src/io/input_file.h"

namespace snug::detail {
namespace {

void add(Checksum& sum, std::string_view bytes) {
  sum.crc32 = static_cast<uint32_t>(::crc32_z(sum.crc32, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
  sum.bytes += static_cast<int64_t>(bytes.size());
}

}  // namespace

Checksum checksum_of(std::span<const std::string_view> parts) {
  Checksum sum;
  for (const std::string_view part : parts) {
    // zlib starts anew when it is given a null pointer, as empty parts may have.
    if (!part.empty()) {
      add(sum, part);
    }
  }
  return sum;
}

Checksum joined(const Checksum& first, const Checksum& second) {
  return {.bytes = first.bytes + second.bytes,
          .crc32 = static_cast<uint32_t>(::crc32_combine(first.crc32, second.crc32, second.bytes))};
}

Checksum checksum_of_file(const std::filesystem::path& path) {
  constexpr int64_t kBlock = int64_t{1} << 20;
  const InputFile file(path);
  std::string block(static_cast<size_t>(std::min(kBlock, file.size())), '\0');
  Checksum sum;
  while (sum.bytes < file.size()) {
    const auto count = static_cast<size_t>(std::min(kBlock, file.size() - sum.bytes));
    file.read_at(sum.bytes, {block.data(), count});
    add(sum, {block.data(), count});
  }
  return sum;
}

}  // namespace snug::detail
