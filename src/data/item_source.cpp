#include <algorithm>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/loader.h"

namespace snug {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> entries_by_name(const fs::path& folder, bool folders) {
  std::vector<fs::path> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const bool is_hidden = entry.path().filename().string().starts_with('.');
    if (!is_hidden && (folders ? entry.is_directory() : entry.is_regular_file())) {
      found.push_back(entry.path());
    }
  }
  std::ranges::sort(found);
  return found;
}

}  // namespace

ItemSource ItemSource::of_tensors(std::vector<at::Tensor> tensors) {
  if (tensors.empty()) {
    throw ConfigError("ItemSource.of_tensors: there are no tensors");
  }
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.dim() == 0 || tensor.size(0) != tensors.front().size(0)) {
      throw ConfigError(
          "ItemSource.of_tensors: the tensors have different numbers of rows; each item is a row of each");
    }
  }
  const int64_t size = tensors.front().size(0);
  return {.size = size, .get = [tensors = std::move(tensors)](int64_t index, uint64_t) {
            Item item;
            for (const at::Tensor& tensor : tensors) {
              item.push_back(tensor.select(0, index));
            }
            return item;
          }};
}

ItemSource ItemSource::of_folder(const fs::path& folder, std::function<at::Tensor(const fs::path& file)> read) {
  if (!fs::is_directory(folder)) {
    throw ConfigError(fmt::format("ItemSource.of_folder: there is no folder '{}'", folder.string()));
  }
  struct File {
    fs::path path;
    int64_t label;
  };
  const auto files = std::make_shared<std::vector<File>>();
  int64_t label = 0;
  for (const fs::path& of_class : entries_by_name(folder, /*folders=*/true)) {
    const auto paths = entries_by_name(of_class, /*folders=*/false);
    if (paths.empty()) {
      throw ConfigError(fmt::format("ItemSource.of_folder: the class '{}' has no file", of_class.string()));
    }
    for (const fs::path& path : paths) {
      files->push_back({path, label});
    }
    ++label;
  }
  if (files->empty()) {
    throw ConfigError(fmt::format("ItemSource.of_folder: '{}' has no subfolders; each class needs one with its files",
                                  folder.string()));
  }
  const auto at = [files](int64_t index) -> const File& { return (*files)[static_cast<size_t>(index)]; };
  return {.size = static_cast<int64_t>(files->size()),
          .get = [at, read = std::move(read)](
                     int64_t index,
                     uint64_t) { return Item{read(at(index).path), at::scalar_tensor(at(index).label, at::kLong)}; },
          .name = [at](int64_t index) { return at(index).path.string(); }};
}

}  // namespace snug
