#include <string>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "snug/snapshot.h"
#include "src/core/file_system.h"
#include "tests/io/two_parts.h"
#include "tests/support/failing_file_system.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/unsynced_file_system.h"

namespace snug::snapshot_crash_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::FailingFileSystem;
using ::testing::HasSubstr;
using testing::holding;
using testing::load;
using testing::names_in;
using testing::save;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;
using testing::unsynced_files;
namespace fs = std::filesystem;

// Saves one number as a snapshot of step 7, of which there may be only one.
void save_number(const fs::path& directory, int64_t number, detail::FileSystem& files = unsynced_files()) {
  StateDict state;
  state.set("number", number);
  SnapshotStore(directory, {.keep = 1}, files).save(7, {{"part", holding(state)}});
}

int64_t load_number(const fs::path& directory) {
  StateDict state;
  const SnapshotStore store(directory);
  EXPECT_TRUE(fs::exists(store.path_of(7)));
  EXPECT_EQ(store.load_latest({{"part", holding(state)}}), 7);
  return state.get<int64_t>("number");
}

void save_step(const fs::path& directory, int64_t step, detail::FileSystem& files = unsynced_files()) {
  SnapshotStore store(directory, {.keep = 2}, files);
  save(store, step);
}

// Runs `body` with a file system whose k-th operation fails, for every k that there is, each time
// in a fresh copy of what `prepare` makes; then `check`, which is told whether body threw.
template <class Prepare, class Body, class Check>
void for_every_fault(Prepare prepare, Body body, Check check) {
  for (const bool then_dead : {true, false}) {
    bool failed = true;
    for (int64_t k = 1; failed; ++k) {
      SCOPED_TRACE(fmt::format("operation {} fails, dead after it: {}", k, then_dead));
      TemporaryFolder folder;
      prepare(folder.path());
      FailingFileSystem files({.fail_at = k, .then_dead = then_dead}, unsynced_files());
      failed = false;
      try {
        body(folder.path(), files);
      } catch (const Error&) {
        failed = true;
      }
      EXPECT_EQ(failed, k <= files.operations());
      check(folder.path(), failed);
      ASSERT_LT(k, 100);
    }
  }
}

TEST(SnapshotCrash, LeavesTheOldOrTheNewSnapshot) {
  for_every_fault(
      [](const fs::path& directory) {
        save_step(directory, 1);
        save_step(directory, 2);
      },
      [](const fs::path& directory, detail::FileSystem& files) { save_step(directory, 3, files); },
      [](const fs::path& directory, bool failed) {
        const auto found = load(directory);
        EXPECT_TRUE(found == 3 || (failed && found == 2)) << found.value_or(-1);
        // The next save works, and clears away whatever is left.
        save_step(directory, 4);
        EXPECT_EQ(load(directory), 4);
        EXPECT_EQ(names_in(directory).size(), 2u);
      });
}

TEST(SnapshotCrash, LeavesNothingOrAWholeSnapshotInANewFolder) {
  for_every_fault(
      [](const fs::path&) {},
      [](const fs::path& directory, detail::FileSystem& files) { save_step(directory / "new/run", 1, files); },
      [](const fs::path& directory, bool failed) {
        const auto found = load(directory / "new/run");
        EXPECT_TRUE(found == 1 || (failed && !found));
      });
}

TEST(SnapshotCrash, NeverLosesTheOnlySnapshotWhileReplacingIt) {
  for_every_fault([](const fs::path& directory) { save_number(directory, 1); },
                  [](const fs::path& directory, detail::FileSystem& files) { save_number(directory, 2, files); },
                  [](const fs::path& directory, bool failed) {
                    const int64_t number = load_number(directory);
                    EXPECT_TRUE(number == 2 || (failed && number == 1)) << number;
                    save_number(directory, 3);
                    EXPECT_EQ(load_number(directory), 3);
                    EXPECT_THAT(names_in(directory), ElementsAre("step-00000007"));
                  });
}

TEST(SnapshotCrash, MayHappenAgainWhileTheNextSaveCleansUp) {
  const auto crash_at = [](int64_t k, const fs::path& directory) {
    FailingFileSystem files({.fail_at = k, .then_dead = true}, unsynced_files());
    try {
      save_number(directory, 2, files);
      return false;
    } catch (const Error&) {
      return true;
    }
  };
  bool crashed = true;
  for (int64_t first = 1; crashed; ++first) {
    SCOPED_TRACE(fmt::format("the first crash is at operation {}", first));
    for_every_fault(
        [&](const fs::path& directory) {
          save_number(directory, 1);
          crashed = crash_at(first, directory);
        },
        [](const fs::path& directory, detail::FileSystem& files) { save_number(directory, 3, files); },
        [](const fs::path& directory, bool failed) {
          const int64_t number = load_number(directory);
          EXPECT_TRUE(number == 3 || (failed && (number == 1 || number == 2))) << number;
        });
    ASSERT_LT(first, 100);
  }
}

TEST(SnapshotCrash, LeavesNoRubbishIfTheProcessLives) {
  TemporaryFolder folder;
  save_step(folder.path(), 1);
  FailingFileSystem full({.fail_at = 3}, unsynced_files());  // the second part
  EXPECT_THROW(save_step(folder.path(), 2, full), Error);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000001"));

  StateDict bad;
  bad.set("text", std::string("\xff"));
  SnapshotStore store(folder.path());
  EXPECT_THAT(([&] { store.save(2, {{"part", holding(bad)}}); }),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("'part'"), HasSubstr("'text'"))));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000001"));
}

}  // namespace
}  // namespace snug::snapshot_crash_test
