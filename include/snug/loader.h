#pragma once
// ItemSource: a data set as a number of items and a function that gives one item. A Loader makes batches of the items.
// An ItemSource is made from tensors, from a data set of torch::data, from a folder with a subfolder for each class, or
// by hand.
//
//   auto digits = snug::ItemSource::of_tensors({images, labels});
//   auto mnist = snug::ItemSource::of_dataset(torch::data::datasets::MNIST("mnist"));
//   auto pictures = snug::ItemSource::of_folder("pets", read_picture);     // a function from the file to a tensor
//
// Loader: batches of a data set, made by threads ahead of use. After a restart, the order of the items goes on exactly.
//
//   snug::Loader loader(snug::ItemSource::of_tensors({images, labels}), {.batch = 64, .seed = 7});
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

/// A data set that gives any item at any time.
struct ItemSource {
  /// The tensors of one item, such as a picture and a label, each without a dimension for the batch.
  using Item = std::vector<at::Tensor>;

  int64_t size = 0;
  /// Returns item `index`, from 0 to size - 1, on the CPU. Several threads call `get` at once. `seed` is another number
  /// for each item and epoch, and the same number after a restart: draw random changes of the item from `seed`.
  std::function<Item(int64_t index, uint64_t seed)> get = {};
  /// A name for messages, such as the item's file. Empty: the item's number says enough.
  std::function<std::string(int64_t index)> name = {};

  /// Item i: row i of each tensor, as a view. Throws ConfigError for no tensors, and for tensors with different numbers
  /// of rows.
  static ItemSource of_tensors(std::vector<at::Tensor> tensors);

  /// A data set of torch::data whose examples are tensors: data and target, or data alone (TensorExample). Several
  /// threads call the data set's get() at once, as LibTorch's own loaders do on copies of the data set. MNIST and
  /// TensorDataset allow calls from several threads.
  template <class Dataset>
  static ItemSource of_dataset(Dataset dataset) {
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

  /// The files in the subfolders of `folder`, one subfolder for each class. Item i is {read(file), class of the file},
  /// the class an int64 scalar. Classes and files are in the order of their names. Files whose name begins with a dot
  /// are left out. Several threads call `read` at once. Throws ConfigError, naming the folder, if the folder is missing
  /// or a class has no file.
  static ItemSource of_folder(const std::filesystem::path& folder,
                              std::function<at::Tensor(const std::filesystem::path& file)> read);
};

struct LoaderOptions {
  /// Items in a batch, over all ranks. The last batch of an epoch has the remaining items.
  int64_t batch = 32;
  /// True: another order in each epoch, made from the seed (see Sampler). False: the order of the data set.
  bool shuffle = true;
  uint64_t seed = 0;
  /// Whether an epoch ends before a last batch with fewer items.
  bool drop_last = false;
  /// The number of threads that get items. 0: next() gets the items.
  int workers = 2;
  /// The number of batches that are ready or in the making while another batch is used: the bound on memory. At least
  /// 1.
  int ahead = 2;
  /// Whether the thread that makes a batch also copies the batch to page-locked memory, for models on an accelerator:
  /// the copy to the device then takes no time of the training thread. The batches ahead take page-locked memory of the
  /// host. Throws ConfigError without an accelerator.
  bool pin_memory = false;
  /// This rank's part of each batch: a run of the batch's items, as long as the other ranks' parts or one item longer.
  int64_t rank = 0;
  int64_t ranks = 1;
};

/// A worker makes one batch at a time. Batches come in the order of the sampler, for any number of workers. A Loader
/// must not be used by several threads at once.
class Loader {
 public:
  /// Starts the workers. Throws ConfigError, naming the value, for a source without items or get(), and for options out
  /// of range.
  Loader(ItemSource source, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The items of the next batch, stacked: one tensor [n, ...] for each tensor of an item. nullopt at the end of an
  /// epoch; the call after nullopt begins the next epoch.
  /// If a rank's part of a last batch is empty, the rank gets tensors without items, [0, ...], with the sizes and types
  /// of another rank's item. The rank calls get() for the other rank's item. A Stepper takes tensors without items as
  /// any other batch.
  /// Throws Error, with number and name of the item, for:
  /// - exceptions of get();
  /// - an item with other sizes, other types or another number of tensors than the first item of the batch;
  /// - an item without tensors.
  ///
  /// The loader then stands before the failed batch, and next() tries the batch again.
  std::optional<std::vector<at::Tensor>> next();

  /// Returns when all batches that may be made ahead are ready: until the call of next() after wait(), no worker
  /// allocates. For the first step within a budget, because the first step measures.
  void wait();

  /// The epoch of the next batch, from 0.
  int64_t epoch() const;
  /// The number of batches in an epoch.
  int64_t batches() const;

  /// Epoch, position, and everything that the order depends on. Batches that were made ahead do not count.
  StateDict state_dict() const;
  /// Goes on from the state, on any number of ranks and workers. Throws CorruptFile, and has changed nothing, if the
  /// state belongs to another size of data set, seed, batch or order.
  void load_state_dict(const StateDict& state);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
