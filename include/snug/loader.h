#pragma once
// ItemSource: a data set as a number of items and a function that gives one of them; a Loader makes batches of it. Made
// from tensors, from a data set of torch::data, from a folder with a subfolder for each class, or by hand.
//
//   auto digits = snug::tensor_items({images, labels});
//   auto mnist = snug::dataset_items(torch::data::datasets::MNIST("mnist"));
//   auto pictures = snug::folder_items("pets", [](const std::filesystem::path& file) { return read_picture(file); });
//
// Loader: batches of a data set, made by threads ahead of their use, in an order that a restart goes on with exactly.
//
//   snug::Loader loader(snug::tensor_items({images, labels}), {.batch = 64, .seed = 7});
//   for (int epoch = 0; epoch < 10; ++epoch)
//     while (auto batch = loader.next()) stepper.step(snug::Batch(*batch), loss_of);
//   ... save loader.state_dict(), load it after a restart: next() gives the batch that was next

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/state.h"

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

struct LoaderOptions {
  /// Items in a batch, over all ranks; the last one of an epoch has what is left.
  int64_t batch = 32;
  /// Another order in each epoch, made from the seed (see Sampler); false: the order of the data set.
  bool shuffle = true;
  uint64_t seed = 0;
  /// Whether an epoch ends before a last batch that would have fewer items.
  bool drop_last = false;
  /// Threads that get items. 0: next() gets them itself.
  int workers = 2;
  /// Batches that are ready or in the making while another one is used: the bound on memory. At least 1.
  int ahead = 2;
  /// This rank's part of each batch: a run of its items, as long as the others' or one longer.
  int64_t rank = 0;
  int64_t ranks = 1;
};

/// A worker makes one batch at a time; batches come in the order of the sampler, however many workers there are. Not
/// for several threads at once.
class Loader {
 public:
  /// Starts the workers. Throws ConfigError, naming the value, for a source without items or get(), and for options out
  /// of range.
  Loader(ItemSource source, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The items of the next batch, stacked: one tensor for each of an item's, [n, ...]. None at the end of an epoch; the
  /// call after that begins the next one. A rank whose part of a last batch is empty gets tensors without items,
  /// [0, ...], of the sizes and types of another rank's item, for which it calls get(): a Stepper takes them as any
  /// other batch.
  /// Throws Error, with number and name of the item, for what get() throws, for an item that has other sizes, types or
  /// another number of tensors than the first of its batch, and for one without tensors. The loader then stands before
  /// that batch, and next() tries it again.
  std::optional<std::vector<at::Tensor>> next();

  /// Returns when all batches that may be made ahead are ready: until the call of next() after that, no worker
  /// allocates. For the first step within a memory_budget, which measures.
  void wait();

  /// The epoch of the batch that comes next, from 0, and how many of its items, of all ranks, were used.
  int64_t epoch() const;
  int64_t position() const;
  /// Batches of an epoch.
  int64_t batches() const;

  /// Epoch, position, and what the order depends on. Batches that were made ahead do not count.
  StateDict state_dict() const;
  /// Goes on from there, on any number of ranks and workers. Throws CorruptFile, and has changed nothing, if the state
  /// is of another size of data set, seed, batch or order.
  void load_state_dict(const StateDict& state);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
