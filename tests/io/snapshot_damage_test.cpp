#include <array>
#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "snug/snapshot.h"
#include "src/core/file_system.h"
#include "tests/io/two_parts.h"
#include "tests/support/temporary_folder.h"

namespace snug::snapshot_damage_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::load;
using testing::save;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;
using testing::TwoParts;
namespace fs = std::filesystem;

void overwrite(const fs::path& path, std::string_view content) {
  detail::FileSystem::real().write_file(path, std::array{content});
}

class DamagedSnapshot : public ::testing::Test {
 protected:
  DamagedSnapshot() : store_(folder_.path()) {
    save(store_, 1);
    save(store_, 2);
  }

  // Loading must fail, name folder and cure, and give nothing to any part; and the cure must help.
  void expect_refused(const std::string& what) {
    TwoParts two;
    EXPECT_THAT([&] { store_.load_latest(two.parts()); },
                ThrowsMessage<CorruptFile>(AllOf(HasSubstr((folder_ / "step-00000002").string()), HasSubstr(what),
                                                 HasSubstr("remove that folder to resume from step 1"))));
    EXPECT_EQ(two.model.loads + two.optimizer.loads, 0);
    fs::remove_all(newest());
    EXPECT_EQ(load(folder_.path()), 1);
  }

  fs::path newest() const { return folder_ / "step-00000002"; }
  std::string read(const char* name) const { return detail::FileSystem::real().read_file(newest() / name); }

  TemporaryFolder folder_;
  SnapshotStore store_;
};

TEST_F(DamagedSnapshot, IsFoundByOneFlippedBitInATensor) {
  std::string bytes = read("optimizer.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  overwrite(newest() / "optimizer.safetensors", bytes);
  expect_refused("optimizer.safetensors has");
}

TEST_F(DamagedSnapshot, IsFoundByATruncatedFile) {
  std::string bytes = read("model.safetensors");
  bytes.resize(bytes.size() / 2);
  overwrite(newest() / "model.safetensors", bytes);
  expect_refused("model.safetensors has");
}

TEST_F(DamagedSnapshot, IsFoundByAMissingFile) {
  fs::remove(newest() / "model.safetensors");
  expect_refused("model.safetensors is missing");
}

TEST_F(DamagedSnapshot, IsFoundByAMissingManifest) {
  fs::remove(newest() / "manifest.json");
  expect_refused("no manifest.json");
}

TEST_F(DamagedSnapshot, IsFoundByAManifestThatIsNotJson) {
  overwrite(newest() / "manifest.json", "{\"format\": \"snug snap");
  expect_refused("manifest cannot be read");
}

TEST_F(DamagedSnapshot, IsFoundByAManifestWithoutItsFields) {
  for (const char* field : {"format", "version", "step", "files", "bytes", "crc32"}) {
    SCOPED_TRACE(field);
    std::string text = read("manifest.json");
    text.replace(text.find(field), 1, "x");
    overwrite(newest() / "manifest.json", text);
    TwoParts two;
    EXPECT_THROW(store_.load_latest(two.parts()), CorruptFile);
    fs::remove_all(newest());
    save(store_, 2);
  }
}

TEST_F(DamagedSnapshot, IsFoundByAManifestOfAnotherVersionOrStep) {
  const std::string text = read("manifest.json");
  std::string other = text;
  other.replace(other.find("\"version\": 1"), 12, "\"version\": 2");
  overwrite(newest() / "manifest.json", other);
  TwoParts two;
  EXPECT_THAT([&] { store_.load_latest(two.parts()); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr(newest().string()), HasSubstr("later version"))));
  other = text;
  other.replace(other.find("\"step\": 2"), 9, "\"step\": 3");
  overwrite(newest() / "manifest.json", other);
  expect_refused("its manifest says step 3");
}

TEST_F(DamagedSnapshot, IsPassedOverWhereSomebodyListensAndThenSetAside) {
  fs::remove(newest() / "manifest.json");
  std::map<int64_t, std::string> damaged;
  SnapshotStore store(folder_.path(),
                      {.on_damaged = [&](int64_t step, const std::string& reason) { damaged[step] = reason; }});
  TwoParts two;
  EXPECT_EQ(store.load_latest(two.parts()), 1);
  EXPECT_TRUE(two.model.is(1));
  ASSERT_EQ(damaged.size(), 1u);
  EXPECT_THAT(damaged.at(2), AllOf(HasSubstr(newest().string()), HasSubstr("manifest.json")));
  EXPECT_EQ(store.set_aside(2).filename(), "step-00000002.damaged");
  EXPECT_EQ(store.latest(), 1);
  save(store, 2);
  EXPECT_EQ(load(folder_.path()), 2);
  EXPECT_TRUE(fs::exists(folder_ / "step-00000002.damaged"));
}

TEST_F(DamagedSnapshot, IsNotPassedOverWhereALaterVersionSavedIt) {
  std::string text = read("manifest.json");
  text.replace(text.find("\"version\": 1"), 12, "\"version\": 2");
  overwrite(newest() / "manifest.json", text);
  SnapshotStore store(folder_.path(), {.on_damaged = [](int64_t, const std::string&) {}});
  TwoParts two;
  EXPECT_THROW(store.load_latest(two.parts()), ConfigError);
  EXPECT_EQ(two.model.loads, 0);
}

TEST_F(DamagedSnapshot, IsFoundAmongAllOfThem) {
  overwrite(newest() / "optimizer.safetensors", "");
  const auto all = store_.inspect();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].step, 1);
  EXPECT_EQ(all[0].damage, "");
  EXPECT_GT(all[0].bytes, 0);
  EXPECT_EQ(all[1].folder, newest());
  EXPECT_THAT(all[1].damage, HasSubstr("optimizer.safetensors has 0 bytes"));
}

TEST_F(DamagedSnapshot, IsNamedAsTheOnlyOneIfItIs) {
  fs::remove_all(folder_ / "step-00000001");
  fs::remove(newest() / "manifest.json");
  TwoParts two;
  EXPECT_THAT([&] { store_.load_latest(two.parts()); }, ThrowsMessage<CorruptFile>(HasSubstr("start anew")));
}

TEST_F(DamagedSnapshot, IsOfNoInterestInPartsThatAreNotAskedFor) {
  overwrite(newest() / "optimizer.safetensors", "");
  TwoParts two;
  EXPECT_EQ(store_.load_latest({{"model", two.model.stateful()}}), 2);
  EXPECT_TRUE(two.model.is(2));
}

}  // namespace
}  // namespace snug::snapshot_damage_test
