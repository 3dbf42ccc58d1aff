#include "snug/io/safetensors.h"

#include "snug/core/error.h"
#include "snug/io/detail/safetensors_file.h"

namespace snug {

void save_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata, FileSystem& files) {
  const detail::SafetensorsContent content(tensors, metadata, path.string());
  std::filesystem::path unfinished = path;
  unfinished += ".tmp";
  try {
    files.write_file(unfinished, content.parts());
    files.rename(unfinished, path);
  } catch (...) {
    try {
      files.remove_all(unfinished);
    } catch (const Error&) {  // The first error is the one to tell.
    }
    throw;
  }
  files.sync_directory(path.has_parent_path() ? path.parent_path() : ".");
}

std::map<std::string, at::Tensor> load_safetensors(const std::filesystem::path& path) {
  return detail::SafetensorsReader(path).tensors();
}

std::map<std::string, std::string> read_safetensors_metadata(const std::filesystem::path& path) {
  return detail::SafetensorsReader(path).header().metadata;
}

}  // namespace snug
