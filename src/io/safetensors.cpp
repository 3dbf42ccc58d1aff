#include "snug/safetensors.h"

#include <list>
#include <system_error>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/file_system.h"
#include "src/io/input_file.h"
#include "src/io/safetensors_file.h"
#include "src/io/safetensors_index.h"
#include "src/io/strict_json.h"

namespace snug {
namespace {

namespace fs = std::filesystem;

bool is_index(const fs::path& path) { return path.extension() == ".json"; }

detail::SafetensorsIndex read_index(const fs::path& path) {
  const detail::InputFile file(path);
  if (file.size() > detail::kSafetensorsHeaderLimit) {
    detail::refuse_safetensors(file.name(), fmt::format("the index has {} bytes, more than the {} of a header",
                                                        file.size(), detail::kSafetensorsHeaderLimit));
  }
  std::string json(static_cast<size_t>(file.size()), '\0');
  file.read_at(0, json);
  return detail::parse_safetensors_index(json, file.name());
}

// All shards of the index, open, with their headers checked.
std::list<detail::SafetensorsReader> open_shards(const fs::path& path) {
  const detail::SafetensorsIndex index = read_index(path);
  std::list<detail::SafetensorsReader> shards;
  for (const auto& [name, tensors] : index.shards) {
    const fs::path shard = path.parent_path() / name;
    if (std::error_code ignored; !fs::exists(shard, ignored)) {
      throw Error(fmt::format("load_safetensors: {}: its shard {} is not in the same folder; put all shards there",
                              path.string(), name));
    }
    detail::check_shard(index, name, shards.emplace_back(shard).header(), path.string());
  }
  return shards;
}

}  // namespace

void save_safetensors(const fs::path& path, const std::map<std::string, at::Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  detail::Writers& writers = detail::Writers::now();
  int64_t number = writers.is_first() ? detail::random_number() : 0;
  writers.add_up({&number, 1});
  const fs::path unfinished = detail::unfinished_path(path, number);
  detail::FileSystem& files = detail::FileSystem::real();
  const auto write = [&] { detail::write_safetensors(files, unfinished, tensors, metadata, path.string()); };
  writers.together([&] { writers.is_first() ? detail::replace_file(path, unfinished, write, files) : write(); });
}

std::map<std::string, at::Tensor> load_safetensors(const fs::path& path) {
  if (!is_index(path)) {
    return detail::SafetensorsReader(path).tensors();
  }
  std::map<std::string, at::Tensor> result;
  for (const detail::SafetensorsReader& shard : open_shards(path)) {
    result.merge(shard.tensors());
  }
  return result;
}

std::map<std::string, std::string> read_safetensors_metadata(const fs::path& path) {
  return is_index(path) ? read_index(path).metadata : detail::SafetensorsReader(path).header().metadata;
}

}  // namespace snug
