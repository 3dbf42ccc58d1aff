#pragma once
// A snapshot's manifest.json as plain data: what the folder must hold.

#include <cstdint>
#include <map>
#include <string>

#include "snug/io/detail/checksum.h"

namespace snug::detail {

struct Manifest {
  int64_t step = 0;
  std::map<std::string, Checksum> parts;  // by name: size and checksum of <name>.safetensors
};

std::string format_manifest(const Manifest& manifest);

/// Throws CorruptFile, with what is wrong, for anything else than what format_manifest writes.
Manifest parse_manifest(const std::string& text);

}  // namespace snug::detail
