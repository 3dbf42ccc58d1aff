#include "snug/snapshot.h"

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "snug/safetensors.h"
#include "src/core/file_system.h"
#include "tests/io/two_parts.h"
#include "tests/support/temporary_folder.h"

namespace snug::snapshot_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::holding;
using testing::load;
using testing::names_in;
using testing::save;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;
using testing::TwoParts;
namespace fs = std::filesystem;

TEST(SnapshotStore, FindsNothingWhereNothingWasSaved) {
  TemporaryFolder folder;
  TwoParts two;
  const SnapshotStore store(folder / "absent");
  EXPECT_EQ(store.latest(), std::nullopt);
  EXPECT_EQ(store.load_latest(two.parts()), std::nullopt);
  EXPECT_EQ(two.model.loads, 0);
  EXPECT_FALSE(fs::exists(folder / "absent"));
  EXPECT_EQ(SnapshotStore(folder.path()).latest(), std::nullopt);
}

TEST(SnapshotStore, LoadsTheNewestSnapshot) {
  TemporaryFolder folder;
  SnapshotStore store(folder / "a/b");
  save(store, 9);
  save(store, 120);
  EXPECT_EQ(store.latest(), 120);
  EXPECT_EQ(store.path_of(120), folder / "a/b/step-00000120");
  EXPECT_EQ(load(folder / "a/b"), 120);
}

TEST(SnapshotStore, LoadsIntoTensorsThatAreThereWithoutTensorMemory) {
  TemporaryFolder folder;
  const at::Tensor saved = at::arange(100'000, at::kFloat);
  const at::Tensor own = at::zeros({100'000}, at::kFloat);
  StateDict state;
  state.set("flag", at::ones({3}, at::kBool));
  state.set("tensor", saved);
  SnapshotStore store(folder.path());
  store.save(1, {{"part", holding(state)}});
  const int64_t before = live_bytes(at::kCPU).count();
  int64_t most = 0;
  store.load_latest({{"part",
                      {[] { return StateDict(); },
                       [&](const StateDict& loaded) {
                         most = live_bytes(at::kCPU).count();
                         own.copy_(loaded.get<at::Tensor>("tensor"));
                         EXPECT_TRUE(loaded.get<at::Tensor>("flag").all().item<bool>());
                       }}}});
  EXPECT_EQ(most, before);
  EXPECT_TRUE(at::equal(own, saved));
}

TEST(SnapshotStore, GivesTensorsThatOutliveTheirSnapshot) {
  TemporaryFolder folder;
  SnapshotStore store(folder.path());
  StateDict state;
  state.set("tensor", at::full({1000}, 7, at::kDouble));
  store.save(1, {{"part", holding(state)}});
  store.load_latest({{"part", holding(state)}});
  fs::remove_all(store.path_of(1));
  const auto& tensor = state.get<at::Tensor>("tensor");
  EXPECT_TRUE(at::equal(tensor, at::full({1000}, 7, at::kDouble)));
  tensor.add_(1);
  EXPECT_EQ(tensor[999].item<double>(), 8);
}

TEST(SnapshotStore, LaysItsFilesOutAsDocumented) {
  TemporaryFolder folder;
  SnapshotStore store(folder.path());
  save(store, 120);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000120"));
  EXPECT_THAT(names_in(store.path_of(120)), ElementsAre("manifest.json", "model.safetensors", "optimizer.safetensors"));
  const auto metadata = read_safetensors_metadata(store.path_of(120) / "model.safetensors");
  EXPECT_EQ(metadata.at("format"), "pt");
  EXPECT_EQ(metadata.at("snug.state"), R"({"step":120,"tensor":null})");
}

TEST(SnapshotStore, GivesTheSameBytesForTheSameState) {
  TemporaryFolder folder;
  SnapshotStore first(folder / "1");
  SnapshotStore second(folder / "2");
  save(first, 5);
  save(second, 5);
  for (const char* name : {"manifest.json", "model.safetensors"}) {
    EXPECT_EQ(detail::FileSystem::real().read_file(first.path_of(5) / name),
              detail::FileSystem::real().read_file(second.path_of(5) / name));
  }
}

TEST(SnapshotStore, RestoresEveryKindOfEntryExactly) {
  TemporaryFolder folder;
  const std::vector<double> doubles{0.1,
                                    -0.0,
                                    1.0,
                                    1e300,
                                    -5e-324,
                                    std::numeric_limits<double>::max(),
                                    std::numeric_limits<double>::infinity(),
                                    -std::numeric_limits<double>::infinity(),
                                    std::bit_cast<double>(uint64_t{0x7ff8000000000123}),
                                    std::nextafter(1.0, 2.0)};
  StateDict numbers;
  for (size_t i = 0; i < doubles.size(); ++i) {
    numbers.set(fmt::format("{}", doubles.size() - i), doubles[i]);
  }
  numbers.set("integer", std::numeric_limits<int64_t>::min());
  numbers.set("large", std::numeric_limits<int64_t>::max());
  StateDict state;
  state.set("z", at::arange(3, at::kBFloat16));
  state.set("numbers", numbers);
  state.set("nothing", StateDict());
  state.set("text", std::string("line\n\"π\"\0end", 14));
  state.set("yes", true);
  state.set("a.b", at::scalar_tensor(std::numeric_limits<double>::quiet_NaN(), at::kDouble));
  const StateDict original = state;

  SnapshotStore(folder.path()).save(1, {{"all", holding(state)}});
  state = StateDict();
  ASSERT_EQ(SnapshotStore(folder.path()).load_latest({{"all", holding(state)}}), 1);

  std::vector<std::string> order;
  for (const StateDict::Entry& entry : state.entries()) {
    order.push_back(entry.name);
  }
  EXPECT_THAT(order, ElementsAre("z", "numbers", "nothing", "text", "yes", "a.b"));
  EXPECT_EQ(state.get<at::Tensor>("z").scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(state.get<at::Tensor>("z"), original.get<at::Tensor>("z")));
  EXPECT_TRUE(std::isnan(state.get<at::Tensor>("a.b").item<double>()));
  EXPECT_EQ(state.get<at::Tensor>("a.b").dim(), 0);
  EXPECT_EQ(state.get<std::string>("text"), original.get<std::string>("text"));
  EXPECT_TRUE(state.get<bool>("yes"));
  EXPECT_TRUE(state.get<StateDict>("nothing").empty());
  const auto& loaded = state.get<StateDict>("numbers");
  EXPECT_EQ(loaded.get<int64_t>("integer"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(loaded.get<int64_t>("large"), std::numeric_limits<int64_t>::max());
  for (size_t i = 0; i < doubles.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint64_t>(std::get<double>(loaded.entries()[i].value)), std::bit_cast<uint64_t>(doubles[i]))
        << doubles[i];
  }
}

TEST(SnapshotStore, KeepsTheNewestAndRemovesTheOthers) {
  TemporaryFolder folder;
  SnapshotStore store(folder.path(), {.keep = 2});
  for (const int64_t step : {1, 2, 3, 4}) {
    save(store, step);
  }
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000003", "step-00000004"));
  SnapshotStore(folder.path(), {.keep = 1});  // touches nothing by itself
  EXPECT_EQ(names_in(folder.path()).size(), 2u);
}

TEST(SnapshotStore, SavesStepsOfMoreThanEightDigits) {
  TemporaryFolder folder;
  SnapshotStore store(folder.path());
  save(store, 99'999'999);
  save(store, 123'456'789'012);
  EXPECT_EQ(load(folder.path()), 123'456'789'012);
}

TEST(SnapshotStore, ReplacesASnapshotOfTheSameStep) {
  TemporaryFolder folder;
  SnapshotStore store(folder.path(), {.keep = 1});
  StateDict state;
  for (const int64_t value : {1, 2}) {
    state.set("value", value);
    store.save(7, {{"part", holding(state)}});
  }
  state = StateDict();
  EXPECT_EQ(store.load_latest({{"part", holding(state)}}), 7);
  EXPECT_EQ(state.get<int64_t>("value"), 2);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000007"));
}

TEST(SnapshotStore, LeavesFilesThatAreNotItsOwnAlone) {
  TemporaryFolder folder;
  for (const char* name : {"notes.tmp", "step-x.tmp", "step-1", "step-00000001x", "step--0000001"}) {
    fs::create_directory(folder / name);
  }
  SnapshotStore store(folder.path(), {.keep = 1});
  save(store, 2);
  save(store, 3);
  EXPECT_EQ(names_in(folder.path()).size(), 6u);
  EXPECT_EQ(store.latest(), 3);
}

TEST(SnapshotStore, RefusesPartsThatTheSnapshotLacksBeforeLoadingAny) {
  TemporaryFolder folder;
  SnapshotStore store(folder.path());
  save(store, 1);
  TwoParts two;
  auto parts = two.parts();
  parts["scaler"] = two.model.stateful();
  EXPECT_THAT([&] { store.load_latest(parts); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("'scaler'"), HasSubstr("settings"))));
  EXPECT_EQ(two.model.loads, 0);
}

TEST(SnapshotStore, RefusesBadArguments) {
  TemporaryFolder folder;
  EXPECT_THROW(SnapshotStore(folder.path(), {.keep = 0}), ConfigError);
  SnapshotStore store(folder.path());
  EXPECT_THAT([&] { save(store, -1); }, ThrowsMessage<ConfigError>(HasSubstr("negative")));
  StateDict state;
  for (const char* name : {"", "a/b", "..", ".hidden", "a b", "ä"}) {
    EXPECT_THAT(([&] { store.save(1, {{name, holding(state)}}); }),
                ThrowsMessage<ConfigError>(HasSubstr("name of a part")))
        << name;
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
  save(store, 5);
  EXPECT_THAT([&] { save(store, 4); }, ThrowsMessage<ConfigError>(HasSubstr("before the newest snapshot, 5")));
}

TEST(SnapshotStore, RefusesStateThatItCouldNotGiveBack) {
  TemporaryFolder folder;
  SnapshotStore store(folder.path());
  StateDict inner;
  inner.set("b", at::ones({1}));
  StateDict twice;
  twice.set("a.b", at::ones({1}));
  twice.set("a", inner);
  EXPECT_THAT(([&] { store.save(1, {{"part", holding(twice)}}); }),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("'a.b'"), HasSubstr("twice"))));
  StateDict undefined;
  undefined.set("gradient", at::Tensor());
  EXPECT_THAT(([&] { store.save(1, {{"part", holding(undefined)}}); }),
              ThrowsMessage<ConfigError>(HasSubstr("'gradient' is undefined")));
  EXPECT_EQ(store.latest(), std::nullopt);
}

}  // namespace
}  // namespace snug::snapshot_test
