#pragma once
// ItemSource: a data set as a number of items and a function that gives one of them; a Loader makes batches of it. Made
// from tensors, from a data set of torch::data, from a folder with a subfolder for each class, or by hand.
//
//   auto digits = snug::tensor_items({images, labels});
//   auto mnist = snug::dataset_items(torch::data::datasets::MNIST("mnist"));
//   auto pictures = snug::folder_items("pets", [](const std::filesystem::path& file) { return read_picture(file); });

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

/// What a model sees of one item, such as a picture and its label, each without a dimension for the batch.
using Item = std::vector<at::Tensor>;

/// A data set that gives any of its items at any time.
struct ItemSource {
  int64_t size = 0;
  /// Item `index`, from 0 to size - 1, on the CPU. Called by several threads at once. `seed` is another number for each
  /// item and epoch, and the same one after a restart: random changes of the item are to be drawn from it.
  std::function<Item(int64_t index, uint64_t seed)> get = {};
  /// For messages, such as the item's file; empty: its number says enough.
  std::function<std::string(int64_t index)> name = {};
};

/// Item i: row i of each tensor, as a view. Throws ConfigError unless there are tensors, all with as many rows.
ItemSource tensor_items(std::vector<at::Tensor> tensors);

/// A data set of torch::data whose examples are tensors: data and target, or data alone (TensorExample). Its get() is
/// called by several threads at once, as by LibTorch's own loaders on copies of the data set; MNIST and TensorDataset
/// allow that.
template <class Dataset>
ItemSource dataset_items(Dataset dataset) {
  const auto shared = std::make_shared<Dataset>(std::move(dataset));
  return {.size = static_cast<int64_t>(shared->size().value()), .get = [shared](int64_t index, uint64_t) {
            auto example = shared->get(static_cast<size_t>(index));
            if constexpr (requires { example.target; }) {
              return Item{std::move(example.data), std::move(example.target)};
            } else {
              return Item{std::move(example.data)};
            }
          }};
}

/// The files in the subfolders of `folder`, one subfolder for each class: item i is {read(file), its class}, the class
/// an int64 scalar. Classes and files are in the order of their names, and files whose name begins with a dot are
/// passed over. `read` is called by several threads at once. Throws ConfigError, naming the folder, if it is missing or
/// a class has no file.
ItemSource folder_items(const std::filesystem::path& folder,
                        std::function<at::Tensor(const std::filesystem::path& file)> read);

}  // namespace snug
