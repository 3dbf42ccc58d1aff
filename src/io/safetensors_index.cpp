#include "src/io/safetensors_index.h"

#include <algorithm>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/io/strict_json.h"

namespace snug::detail {
namespace {

constexpr const char* kNoun = "index";

[[noreturn]] void refuse_shards(const std::string& file, const std::string& what) {
  throw CorruptFile(fmt::format("load_safetensors: {}: {}; give the index and the shards of one model", file, what));
}

// A file beside the index: other paths, and the folder itself, are none of its business.
bool is_plain_name(const std::string& shard) {
  return !shard.empty() && shard != "." && shard != ".." &&
         shard.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

void add_shards(SafetensorsIndex& index, const nlohmann::json& weight_map, const std::string& file) {
  if (!weight_map.is_object()) {
    refuse_safetensors(file, "weight_map is not an object");
  }
  for (const auto& [name, shard] : weight_map.items()) {
    if (!shard.is_string()) {
      refuse_safetensors(
          file, fmt::format("weight_map gives tensor '{}' the shard {}, not a file's name", name, shown(shard)));
    }
    if (!is_plain_name(shard.get_ref<const std::string&>())) {
      refuse_safetensors(
          file,
          fmt::format("weight_map gives tensor '{}' the shard {}, which is no name of a file in the index's folder",
                      name, shown(shard)));
    }
    index.shards[shard.get<std::string>()].insert(name);
  }
}

void add_metadata(SafetensorsIndex& index, const nlohmann::json& metadata, const std::string& file) {
  if (!metadata.is_object()) {
    refuse_safetensors(file, "metadata is not an object");
  }
  for (const auto& [key, value] : metadata.items()) {
    index.metadata[key] = value.is_string() ? value.get<std::string>() : shown(value);
  }
}

}  // namespace

SafetensorsIndex parse_safetensors_index(std::string_view json, const std::string& file) {
  const nlohmann::json parsed = parse_strict_json(json, kNoun, file);
  if (!parsed.is_object() || !parsed.contains("weight_map")) {
    refuse_safetensors(file, "the index is not a JSON object with a weight_map");
  }
  SafetensorsIndex index;
  add_shards(index, parsed["weight_map"], file);
  if (parsed.contains("metadata")) {
    add_metadata(index, parsed["metadata"], file);
  }
  return index;
}

void check_shard(const SafetensorsIndex& index, const std::string& shard, const SafetensorsHeader& header,
                 const std::string& file) {
  const std::set<std::string>& named = index.shards.at(shard);
  for (const SafetensorsEntry& entry : header.tensors) {
    if (!named.contains(entry.name)) {
      refuse_shards(file,
                    fmt::format("shard {} has a tensor '{}', which the index does not name there", shard, entry.name));
    }
  }
  if (header.tensors.size() == named.size()) {
    return;
  }
  for (const std::string& name : named) {
    if (std::none_of(header.tensors.begin(), header.tensors.end(),
                     [&](const auto& entry) { return entry.name == name; })) {
      refuse_shards(file, fmt::format("tensor '{}' is not in its shard {}", name, shard));
    }
  }
}

}  // namespace snug::detail
