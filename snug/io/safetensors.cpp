#include "snug/io/safetensors.h"

#include "snug/core/file_system.h"
#include "snug/io/detail/safetensors_file.h"

namespace snug {

void save_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata, FileSystem& files) {
  const detail::SafetensorsContent content(tensors, metadata, path.string());
  replace_file(path, content.parts(), files);
}

std::map<std::string, at::Tensor> load_safetensors(const std::filesystem::path& path) {
  return detail::SafetensorsReader(path).tensors();
}

std::map<std::string, std::string> read_safetensors_metadata(const std::filesystem::path& path) {
  return detail::SafetensorsReader(path).header().metadata;
}

}  // namespace snug
