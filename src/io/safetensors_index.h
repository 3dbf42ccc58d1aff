#pragma once
// The index of a model in several safetensors files, its shards, as plain data: no tensors, no torch, no disk.
//
//   model.safetensors.index.json = {"metadata": {"total_size": bytes, ...},
//                                   "weight_map": {name: "model-00001-of-00002.safetensors", ...}}

#include <map>
#include <set>
#include <string>
#include <string_view>

#include "src/io/safetensors_header.h"

namespace snug::detail {

struct SafetensorsIndex {
  std::map<std::string, std::string> metadata;          // what is not text, as JSON
  std::map<std::string, std::set<std::string>> shards;  // by file, which is a name and no path: the tensors in it
};

/// Reads and checks the JSON. Throws CorruptFile; `file` is the index's name for messages. A missing "metadata", and
/// keys besides the two, are no error.
SafetensorsIndex parse_safetensors_index(std::string_view json, const std::string& file);

/// Throws CorruptFile, with the tensor, unless the shard has just the tensors that the index, `file`, gives it.
void check_shard(const SafetensorsIndex& index, const std::string& shard, const SafetensorsHeader& header,
                 const std::string& file);

}  // namespace snug::detail
