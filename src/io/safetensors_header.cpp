#include "src/io/safetensors_header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "snug/core.h"
#include "src/io/strict_json.h"

namespace snug::detail {
namespace {

constexpr const char* kMetadata = "__metadata__";

const nlohmann::json& field(const nlohmann::json& entry, const char* name, const std::string& tensor,
                            const std::string& file) {
  const auto found = entry.find(name);
  if (found == entry.end()) {
    refuse_safetensors(file, fmt::format("tensor '{}' has no {}", tensor, name));
  }
  return *found;
}

std::vector<int64_t> whole_numbers(const nlohmann::json& list, const char* name, const std::string& tensor,
                                   const std::string& file) {
  std::vector<int64_t> numbers;
  bool good = list.is_array();
  for (const nlohmann::json& item : good ? list : nlohmann::json::array()) {
    good = good && item.is_number_unsigned() &&
           item.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    numbers.push_back(good ? item.get<int64_t>() : 0);
  }
  if (!good) {
    refuse_safetensors(
        file, fmt::format("{} of tensor '{}' is {}, not a list of whole numbers >= 0", name, tensor, shown(list)));
  }
  return numbers;
}

// The bytes of a tensor. Dimensions of 0 are left out of the product in the overflow check, because strides are made of
// the other dimensions.
int64_t byte_size(const SafetensorsEntry& entry, const std::string& file) {
  int64_t size = safetensors_element_size(entry.dtype);
  bool empty = false;
  for (const int64_t dimension : entry.shape) {
    empty = empty || dimension == 0;
    if (__builtin_mul_overflow(size, std::max<int64_t>(dimension, 1), &size)) {
      refuse_safetensors(file, fmt::format("shape of tensor '{}' is [{}], more bytes than there can be", entry.name,
                                           fmt::join(entry.shape, ", ")));
    }
  }
  return empty ? 0 : size;
}

SafetensorsEntry parse_entry(const std::string& name, const nlohmann::json& value, const std::string& file) {
  if (!value.is_object()) {
    refuse_safetensors(file, fmt::format("the entry of tensor '{}' is not an object", name));
  }
  const nlohmann::json& dtype = field(value, "dtype", name, file);
  if (!dtype.is_string() || safetensors_element_size(dtype.get<std::string>()) == 0) {
    refuse_safetensors(file, fmt::format("dtype of tensor '{}' is {}, which is not known here", name, shown(dtype)));
  }
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = dtype.get<std::string>();
  entry.shape = whole_numbers(field(value, "shape", name, file), "shape", name, file);
  const auto offsets = whole_numbers(field(value, "data_offsets", name, file), "data_offsets", name, file);
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    refuse_safetensors(file, fmt::format("data_offsets of tensor '{}' are [{}], not a begin and an end", name,
                                         fmt::join(offsets, ", ")));
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];
  if (const int64_t size = byte_size(entry, file); entry.end - entry.begin != size) {
    refuse_safetensors(file, fmt::format("data_offsets of tensor '{}' are [{}, {}], but {} [{}] takes {} bytes", name,
                                         entry.begin, entry.end, entry.dtype, fmt::join(entry.shape, ", "), size));
  }
  return entry;
}

std::map<std::string, std::string> parse_metadata(const nlohmann::json& value, const std::string& file) {
  if (!value.is_object()) {
    refuse_safetensors(file, "__metadata__ is not an object");
  }
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) {
      refuse_safetensors(file, fmt::format("'{}' in __metadata__ is not text", key));
    }
    metadata.emplace(key, text.get<std::string>());
  }
  return metadata;
}

// Sorts by offset and checks that the tensors cover the data without holes and overlaps.
void order_and_check_coverage(std::vector<SafetensorsEntry>& tensors, int64_t data_size, const std::string& file) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  int64_t covered = 0;
  for (const SafetensorsEntry& entry : tensors) {
    if (entry.begin != covered) {
      refuse_safetensors(
          file, fmt::format("data_offsets of tensor '{}' begin at {}, but the tensor before it ends at {}", entry.name,
                            entry.begin, covered));
    }
    covered = entry.end;
  }
  if (covered != data_size) {
    refuse_safetensors(file, fmt::format("data_offsets end at {}, but {} bytes follow the header", covered, data_size));
  }
}

}  // namespace

int64_t safetensors_element_size(std::string_view dtype) {
  static constexpr std::array<std::pair<std::string_view, int64_t>, 16> kSizes{{
      {"BOOL", 1},
      {"U8", 1},
      {"I8", 1},
      {"F8_E5M2", 1},
      {"F8_E4M3", 1},
      {"I16", 2},
      {"U16", 2},
      {"F16", 2},
      {"BF16", 2},
      {"I32", 4},
      {"U32", 4},
      {"F32", 4},
      {"F64", 8},
      {"I64", 8},
      {"U64", 8},
      {"C64", 8},
  }};
  const auto found = std::find_if(kSizes.begin(), kSizes.end(), [&](const auto& item) { return item.first == dtype; });
  return found == kSizes.end() ? 0 : found->second;
}

int64_t parse_safetensors_length(std::string_view prefix, int64_t file_size, const std::string& file) {
  static_assert(std::endian::native == std::endian::little, "tensors are written as they lie");
  if (prefix.size() < kSafetensorsPrefix) {
    refuse_safetensors(file, fmt::format("the file has {} bytes, fewer than the header's length takes", prefix.size()));
  }
  uint64_t length = 0;
  std::memcpy(&length, prefix.data(), sizeof length);
  if (length > static_cast<uint64_t>(kSafetensorsHeaderLimit)) {
    refuse_safetensors(file, fmt::format("the header's length is given as {} bytes, the format allows {}", length,
                                         kSafetensorsHeaderLimit));
  }
  const auto result = static_cast<int64_t>(length);
  if (result > file_size - kSafetensorsPrefix) {
    refuse_safetensors(
        file, fmt::format("the header's length is given as {} bytes, but the file has {} in all", length, file_size));
  }
  return result;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_size, const std::string& file) {
  const nlohmann::json parsed = parse_strict_json(json, "header", file);
  if (!parsed.is_object()) {
    refuse_safetensors(file, "the header is not a JSON object");
  }
  SafetensorsHeader header;
  for (const auto& [name, value] : parsed.items()) {
    if (name == kMetadata) {
      header.metadata = parse_metadata(value, file);
    } else {
      header.tensors.push_back(parse_entry(name, value, file));
    }
  }
  order_and_check_coverage(header.tensors, data_size, file);
  return header;
}

std::string format_safetensors_header(const SafetensorsHeader& header, const std::string& file) {
  using Ordered = nlohmann::ordered_json;
  Ordered json = Ordered::object();
  if (!header.metadata.empty()) {
    json[kMetadata] = header.metadata;
  }
  // Uses the underlying container: operator[] of an ordered object searches all keys.
  auto& entries = json.get_ref<Ordered::object_t&>();
  for (const SafetensorsEntry& entry : header.tensors) {
    entries.emplace_back(
        entry.name,
        Ordered{{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}});
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const Ordered::exception&) {
    throw ConfigError(fmt::format("save_safetensors: {}: a name or metadata is not UTF-8; give text, not bytes", file));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (static_cast<int64_t>(text.size()) > kSafetensorsHeaderLimit) {
    throw ConfigError(
        fmt::format("save_safetensors: {}: the header would take {} bytes, the format allows {}; save the "
                    "tensors to several files",
                    file, text.size(), kSafetensorsHeaderLimit));
  }
  std::string prefix(kSafetensorsPrefix, '\0');
  const uint64_t length = text.size();
  std::memcpy(prefix.data(), &length, sizeof length);
  return prefix + text;
}

}  // namespace snug::detail
