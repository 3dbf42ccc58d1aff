#pragma once
// The header of a safetensors file as plain data: no tensors, no torch, no disk, so that it is
// tested and fuzzed alone.
//
//   file = 8 bytes: length n of the JSON, little-endian; n bytes of JSON; the tensors' bytes
//   JSON = {"__metadata__": {key: text, ...}, name: {"dtype", "shape", "data_offsets"}, ...}
//
// Offsets count from the end of the JSON; together the tensors cover all that follows, without
// gaps (github.com/huggingface/safetensors, "Format").

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace snug::detail {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;           // "F32", "BF16", ...: one that safetensors_element_size knows
  std::vector<int64_t> shape;  // the product fits into int64_t, in bytes, zeros left out
  int64_t begin = 0;           // bytes [begin, end) of the data
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  std::vector<SafetensorsEntry> tensors;  // in the order of their bytes
};

inline constexpr int64_t kSafetensorsPrefix = 8;                 // bytes of the length
inline constexpr int64_t kSafetensorsHeaderLimit = 100'000'000;  // bytes, by the format

/// In bytes; 0 for an unknown dtype.
int64_t safetensors_element_size(std::string_view dtype);

/// The JSON's length from the file's first 8 bytes (or fewer, if it has fewer), checked against the
/// limit and the file's size. Throws CorruptFile; `file` is its name for messages.
int64_t parse_safetensors_length(std::string_view prefix, int64_t file_size, const std::string& file);

/// Reads and checks all of the JSON; `data_size` is how many bytes follow it. Throws CorruptFile.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_size, const std::string& file);

/// The first bytes of the file: length and JSON, padded with spaces to a multiple of 8. Throws
/// ConfigError for text that is not UTF-8 and for a header beyond the limit.
std::string format_safetensors_header(const SafetensorsHeader& header, const std::string& file);

}  // namespace snug::detail
