#pragma once
// A snapshot's manifest.json as plain data: the required content of the folder.

#include <cstdint>
#include <map>
#include <string>

#include "src/io/checksum.h"

namespace snug::detail {

struct Manifest {
  int64_t step = 0;
  std::map<std::string, Checksum> parts;  // by name: size and checksum of <name>.safetensors
};

std::string format_manifest(const Manifest& manifest);

/// Throws CorruptFile, with the reason, for any text that format_manifest does not write; ConfigError, with the
/// snapshot's `folder`, for one of a later version.
Manifest parse_manifest(const std::string& text, const std::string& folder);

}  // namespace snug::detail
