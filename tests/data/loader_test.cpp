#include "snug/loader.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>

#include <ATen/DeviceAccelerator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "tests/support/temporary_folder.h"

namespace snug::loader_test {
namespace {

using Item = ItemSource::Item;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

// Item i is the number i.
ItemSource numbers(int64_t size) { return ItemSource::of_tensors({torch::arange(size)}); }

std::vector<int64_t> values(const at::Tensor& tensor) {
  return {tensor.data_ptr<int64_t>(), tensor.data_ptr<int64_t>() + tensor.numel()};
}

// The items of the next `count` batches, -1 at each end of an epoch.
std::vector<int64_t> drawn(Loader& loader, int count) {
  std::vector<int64_t> all;
  while (count > 0) {
    if (const auto batch = loader.next()) {
      const auto items = values(batch->front());
      all.insert(all.end(), items.begin(), items.end());
      --count;
    } else {
      all.push_back(-1);
    }
  }
  return all;
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Loader, GivesEachItemOnceAnEpochInAnotherOrderEachTime) {
  Loader loader(numbers(10), {.batch = 4, .seed = 3});
  EXPECT_EQ(loader.batches(), 3);
  std::vector<std::vector<int64_t>> epochs;
  for (int epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(loader.epoch(), epoch);
    std::vector<int64_t> items;
    for (const int64_t size : {4, 4, 2}) {
      const auto batch = loader.next();
      ASSERT_TRUE(batch);
      EXPECT_EQ(batch->front().sizes(), at::IntArrayRef({size}));
      for (const int64_t item : values(batch->front())) {
        items.push_back(item);
      }
    }
    EXPECT_FALSE(loader.next());
    EXPECT_EQ(std::set<int64_t>(items.begin(), items.end()).size(), 10U);
    epochs.push_back(items);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
}

TEST(Loader, GivesTheSameBatchesWithAnyNumberOfWorkersAndAhead) {
  Loader alone(numbers(50), {.batch = 7, .seed = 1, .workers = 0});
  const auto expected = drawn(alone, 20);
  for (const int workers : {1, 2, 5}) {
    for (const int ahead : {1, 3, 9}) {
      Loader loader(numbers(50), {.batch = 7, .seed = 1, .workers = workers, .ahead = ahead});
      EXPECT_EQ(drawn(loader, 20), expected) << workers << " workers, " << ahead << " ahead";
    }
  }
}

TEST(Loader, KeepsTheOrderOfTheDataAndDropsALastBatchIfAsked) {
  Loader loader(numbers(7), {.batch = 3, .shuffle = false});
  EXPECT_EQ(drawn(loader, 4), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, -1, 0, 1, 2}));
  Loader dropping(numbers(7), {.batch = 3, .shuffle = false, .drop_last = true});
  EXPECT_EQ(dropping.batches(), 2);
  EXPECT_EQ(drawn(dropping, 3), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, -1, 0, 1, 2}));
}

TEST(Loader, GoesOnAfterARestartWithTheBatchThatWasNext) {
  for (int stop = 0; stop <= 9; ++stop) {
    Loader whole(numbers(23), {.batch = 5, .seed = 9});
    drawn(whole, stop);
    const StateDict state = whole.state_dict();
    const auto expected = drawn(whole, 8);
    Loader resumed(numbers(23), {.batch = 5, .seed = 9, .workers = 1, .ahead = 4});
    drawn(resumed, 2);  // what was made ahead is forgotten
    resumed.load_state_dict(state);
    EXPECT_EQ(drawn(resumed, 8), expected) << "after " << stop << " batches";
  }
}

TEST(Loader, RefusesTheStateOfAnotherOrderAndChangesNothing) {
  Loader loader(numbers(20), {.batch = 4, .seed = 1});
  drawn(loader, 1);
  const auto states = {Loader(numbers(21), {.batch = 4, .seed = 1}).state_dict(),
                       Loader(numbers(20), {.batch = 5, .seed = 1}).state_dict(),
                       Loader(numbers(20), {.batch = 4, .seed = 2}).state_dict(),
                       Loader(numbers(20), {.batch = 4, .shuffle = false, .seed = 1}).state_dict()};
  for (const StateDict& state : states) {
    EXPECT_THROW(loader.load_state_dict(state), CorruptFile);
  }
  StateDict beyond = loader.state_dict();
  beyond.set("position", int64_t{21});
  EXPECT_THROW(loader.load_state_dict(beyond), CorruptFile);
  EXPECT_EQ(loader.state_dict().get<int64_t>("position"), 4);
}

TEST(Loader, DividesEachBatchAmongRanksAlsoAfterARestartOnAnotherNumber) {
  Loader one(numbers(11), {.batch = 4, .seed = 2});
  drawn(one, 1);
  const StateDict state = one.state_dict();
  const auto rest = drawn(one, 2);
  for (const int64_t ranks : {2, 3, 6}) {
    std::vector<std::unique_ptr<Loader>> loaders;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      loaders.push_back(
          std::make_unique<Loader>(numbers(11), LoaderOptions{.batch = 4, .seed = 2, .rank = rank, .ranks = ranks}));
      loaders.back()->load_state_dict(state);
    }
    std::vector<int64_t> together;
    for (int batch = 0; batch < 2; ++batch) {
      for (const auto& loader : loaders) {
        const auto part = drawn(*loader, 1);
        together.insert(together.end(), part.begin(), part.end());
      }
    }
    EXPECT_EQ(together, rest) << ranks << " ranks";
  }
}

TEST(Loader, GivesARankWithoutItemsTensorsOfNoItems) {
  const auto source = ItemSource::of_tensors({torch::rand({9, 2, 3}), torch::arange(9)});
  for (const bool shuffle : {true, false}) {
    Loader loader(source, {.batch = 4, .shuffle = shuffle, .rank = 0, .ranks = 2});
    StateDict state = loader.state_dict();
    state.set("position", int64_t{8});
    loader.load_state_dict(state);  // its first batch is one without items
    const auto batch = loader.next();
    ASSERT_TRUE(batch);
    ASSERT_EQ(batch->size(), 2U);
    EXPECT_EQ((*batch)[0].sizes(), at::IntArrayRef({0, 2, 3}));
    EXPECT_EQ((*batch)[0].scalar_type(), torch::kFloat);
    EXPECT_EQ((*batch)[1].sizes(), at::IntArrayRef({0}));
    EXPECT_EQ((*batch)[1].scalar_type(), torch::kLong);
    EXPECT_FALSE(loader.next());
  }
}

TEST(Loader, MakesNoMoreBatchesAheadThanAllowed) {
  std::atomic<int64_t> made = 0;
  const ItemSource source{.size = 1000, .get = [&](int64_t, uint64_t) {
                            ++made;
                            return Item{torch::zeros(1000)};
                          }};
  const int64_t before = live_bytes(torch::kCPU).count();
  Loader loader(source, {.batch = 10, .workers = 4, .ahead = 3});
  loader.wait();
  EXPECT_EQ(made, 30);
  EXPECT_EQ(live_bytes(torch::kCPU).count() - before, 3 * 10 * 1000 * 4);
  for (int batch = 1; batch <= 5; ++batch) {
    loader.next();
    loader.wait();
    EXPECT_EQ(made, 30 + 10 * batch);
    EXPECT_EQ(live_bytes(torch::kCPU).count() - before, 3 * 10 * 1000 * 4);
  }
}

TEST(Loader, UsesItsWorkersAtTheSameTime) {
  std::mutex mutex;
  std::condition_variable changed;
  int inside = 0;
  // Each item waits for the other worker: one alone would wait for ever, so it gives up after a minute.
  const ItemSource source{.size = 2, .get = [&](int64_t, uint64_t) {
                            std::unique_lock lock(mutex);
                            ++inside;
                            changed.notify_all();
                            const bool met =
                                changed.wait_for(lock, std::chrono::minutes(1), [&] { return inside >= 2; });
                            return Item{torch::full({}, met ? 1 : 0)};
                          }};
  Loader loader(source, {.batch = 1, .workers = 2, .ahead = 2});
  EXPECT_EQ(loader.next()->front().item<int>(), 1);
}

TEST(Loader, GivesAnItemTheSameSeedAfterARestartAndAnotherOneInEachEpoch) {
  const ItemSource source{.size = 4, .get = [](int64_t index, uint64_t seed) {
                            return Item{torch::tensor({index, static_cast<int64_t>(seed)})};
                          }};
  const auto seeds_of_epoch = [&](Loader& loader) {
    std::map<int64_t, int64_t> seeds;
    while (const auto batch = loader.next()) {
      for (int64_t i = 0; i < batch->front().size(0); ++i) {
        seeds[batch->front()[i][0].item<int64_t>()] = batch->front()[i][1].item<int64_t>();
      }
    }
    return seeds;
  };
  Loader loader(source, {.batch = 2, .seed = 5});
  const auto first = seeds_of_epoch(loader);
  const StateDict state = loader.state_dict();
  const auto second = seeds_of_epoch(loader);
  std::set<int64_t> all;
  for (const auto& [index, seed] : first) {
    all.insert(seed);
    all.insert(second.at(index));
  }
  EXPECT_EQ(all.size(), 8U);
  Loader resumed(source, {.batch = 2, .seed = 5, .workers = 0});
  resumed.load_state_dict(state);
  EXPECT_EQ(seeds_of_epoch(resumed), second);
}

TEST(Loader, NamesTheItemThatFailsAndTriesItAgain) {
  for (const int workers : {0, 2}) {
    std::atomic<bool> is_broken = true;
    ItemSource source{.size = 6,
                      .get =
                          [&](int64_t index, uint64_t) {
                            if (index == 4 && is_broken) {
                              throw std::runtime_error("the disk is gone");
                            }
                            return Item{torch::full({}, index)};
                          },
                      .name = [](int64_t index) { return "picture-" + std::to_string(index); }};
    Loader loader(source, {.batch = 2, .shuffle = false, .workers = workers});
    EXPECT_EQ(drawn(loader, 2), (std::vector<int64_t>{0, 1, 2, 3}));
    const std::string said = message_of([&] { loader.next(); });
    EXPECT_THAT(said, HasSubstr("item 4 ('picture-4'): the disk is gone"));
    EXPECT_EQ(loader.state_dict().get<int64_t>("position"), 4);
    is_broken = false;
    std::string again;
    for (int tries = 0; tries < 3; ++tries) {  // a worker may have tried once more before
      again = message_of([&] { EXPECT_EQ(drawn(loader, 1), (std::vector<int64_t>{4, 5})); });
      if (again == "nothing was thrown") {
        break;
      }
    }
    EXPECT_EQ(again, "nothing was thrown");
  }
}

TEST(Loader, RefusesItemsThatDoNotStack) {
  const auto failing = [](std::function<Item(int64_t)> get) {
    return message_of([&] {
      Loader loader({.size = 2, .get = [&](int64_t index, uint64_t) { return get(index); }},
                    {.batch = 2, .shuffle = false});
      loader.next();
    });
  };
  EXPECT_THAT(failing([](int64_t i) { return Item{torch::zeros({2 + i})}; }),
              ::testing::AllOf(HasSubstr("item 1: its tensor 0 is Float [3]"), HasSubstr("item 0 Float [2]")));
  EXPECT_THAT(failing([](int64_t i) { return Item{torch::zeros({2}, i == 0 ? torch::kFloat : torch::kLong)}; }),
              HasSubstr("Long [2]"));
  EXPECT_THAT(failing([](int64_t i) { return Item(static_cast<size_t>(1 + i), torch::zeros({2})); }),
              HasSubstr("it has 2 tensors, and the first of the batch 1"));
  EXPECT_THAT(failing([](int64_t) { return Item{}; }), HasSubstr("item 0: it has 0 tensors"));
  EXPECT_THAT(failing([](int64_t) { return Item{at::Tensor()}; }), HasSubstr("undefined"));
}

TEST(Loader, RefusesOptionsThatCannotWork) {
  const auto refused = [](LoaderOptions options) { return message_of([&] { Loader loader(numbers(4), options); }); };
  EXPECT_THAT(refused({.batch = 0}), HasSubstr("batch is 0"));
  EXPECT_THAT(refused({.batch = 5, .drop_last = true}), HasSubstr("batch is 5"));
  EXPECT_THAT(refused({.workers = -1}), HasSubstr("workers is -1"));
  EXPECT_THAT(refused({.ahead = 0}), HasSubstr("ahead is 0"));
  EXPECT_THAT(refused({.rank = 1}), HasSubstr("rank is 1"));
  EXPECT_THAT(refused({.ranks = 0}), HasSubstr("ranks is 0"));
  if (at::accelerator::deviceCount() == 0) {
    EXPECT_THAT(refused({.pin_memory = true}), HasSubstr("pin_memory is true, and there is no accelerator"));
  }
  EXPECT_THROW(Loader({.size = 0, .get = numbers(1).get}, {}), ConfigError);
  EXPECT_THROW(Loader({.size = 1}, {}), ConfigError);
}

TEST(Loader, EndsWhileWorkersWait) {
  for (int round = 0; round < 50; ++round) {
    Loader loader(numbers(100), {.batch = 1, .workers = 3, .ahead = 4});
    if (round % 2 == 0) {
      loader.next();
    }
  }
}

TEST(ItemSource, OfTensorsHasTheirRows) {
  const auto source = ItemSource::of_tensors({torch::arange(6).view({3, 2}), torch::tensor({7, 8, 9})});
  EXPECT_EQ(source.size, 3);
  const Item item = source.get(1, 0);
  EXPECT_TRUE(torch::equal(item[0], torch::tensor({2, 3})));
  EXPECT_EQ(item[1].item<int64_t>(), 8);
  EXPECT_THROW(ItemSource::of_tensors({}), ConfigError);
  EXPECT_THROW(ItemSource::of_tensors({torch::zeros(2), torch::zeros(3)}), ConfigError);
  EXPECT_THROW(ItemSource::of_tensors({torch::zeros({})}), ConfigError);
}

TEST(ItemSource, OfTorchDataHasDataAndTarget) {
  const auto x = torch::arange(8).view({4, 2}), y = torch::arange(4);
  Loader pairs(
      ItemSource::of_dataset(torch::data::datasets::TensorDataset(std::vector<torch::Tensor>{x[0], x[1], x[2], x[3]})),
      {.batch = 4, .shuffle = false});
  const auto batch = pairs.next();
  ASSERT_TRUE(batch);
  ASSERT_EQ(batch->size(), 1U);
  EXPECT_TRUE(torch::equal(batch->front(), x));

  struct Labelled : torch::data::datasets::Dataset<Labelled> {
    torch::data::Example<> get(size_t index) override {
      return {torch::full({2}, static_cast<int64_t>(index)), torch::full({}, static_cast<int64_t>(10 * index))};
    }
    std::optional<size_t> size() const override { return 4; }
  };
  Loader labelled(ItemSource::of_dataset(Labelled()), {.batch = 2, .shuffle = false});
  const auto two = labelled.next();
  ASSERT_EQ(two->size(), 2U);
  EXPECT_EQ(values((*two)[1]), (std::vector<int64_t>{0, 10}));
}

TEST(ItemSource, OfAFolderHasItsFilesAndTheirClasses) {
  const TemporaryFolder folder;
  for (const char* file : {"b/1", "a/2", "a/10", "a/.hidden"}) {
    std::filesystem::create_directories((folder / file).parent_path());
    std::ofstream(folder / file) << file;
  }
  std::ofstream(folder / "notes") << "no class";
  const auto source = ItemSource::of_folder(folder / "", [](const std::filesystem::path& file) {
    return torch::full({}, static_cast<int64_t>(std::filesystem::file_size(file)));
  });
  ASSERT_EQ(source.size, 3);
  EXPECT_THAT(source.name(0), HasSubstr("a/10"));
  EXPECT_THAT(source.name(2), HasSubstr("b/1"));
  EXPECT_EQ(source.get(0, 0)[0].item<int64_t>(), 4);
  EXPECT_EQ(source.get(1, 0)[1].item<int64_t>(), 0);
  EXPECT_EQ(source.get(2, 0)[1].item<int64_t>(), 1);

  const auto none = [](const std::filesystem::path&) { return at::Tensor(); };
  EXPECT_THAT(message_of([&] { ItemSource::of_folder(folder / "gone", none); }), HasSubstr("gone"));
  std::filesystem::create_directory(folder / "empty");
  EXPECT_THAT(message_of([&] { ItemSource::of_folder(folder / "", none); }), HasSubstr("empty' has no file"));
  EXPECT_THAT(message_of([&] { ItemSource::of_folder(folder / "a", none); }), HasSubstr("has no subfolders"));
}

}  // namespace
}  // namespace snug::loader_test
