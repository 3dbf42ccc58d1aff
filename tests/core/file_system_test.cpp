#include "src/core/file_system.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <future>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "snug/core.h"
#include "tests/support/failing_file_system.h"
#include "tests/support/temporary_folder.h"

namespace snug::file_system_test {
namespace {

using testing::FailingFileSystem;
using testing::TemporaryFolder;
using Parts = std::array<std::string_view, 3>;

constexpr Parts kParts{"head", "", "body"};

template <class Operation>
std::string error_of(Operation operation) {
  try {
    operation();
    return "no error";
  } catch (const Error& error) {
    return error.what();
  }
}

bool mentions(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

TEST(FileSystem, WritesAllPartsInOrderAndReadsThemBack) {
  TemporaryFolder folder;
  detail::FileSystem& files = detail::FileSystem::real();
  files.write_file(folder / "a", kParts);
  EXPECT_EQ(files.read_file(folder / "a"), "headbody");
}

TEST(FileSystem, ReplacesALongerFileWithoutLeavingItsEnd) {
  TemporaryFolder folder;
  detail::FileSystem& files = detail::FileSystem::real();
  files.write_file(folder / "a", std::array<std::string_view, 1>{"something much longer"});
  files.write_file(folder / "a", std::array<std::string_view, 1>{"short"});
  EXPECT_EQ(files.read_file(folder / "a"), "short");
  files.write_file(folder / "a", {});
  EXPECT_EQ(files.read_file(folder / "a"), "");
}

TEST(FileSystem, WritesPartsAtTheirPlacesAndLeavesTheOtherBytes) {
  TemporaryFolder folder;
  detail::FileSystem& files = detail::FileSystem::real();
  const std::array<std::string_view, 1> middle{"cd"};
  EXPECT_THROW(files.write_file(folder / "a", middle, std::array<int64_t, 1>{2}), Error) << "the file must exist";
  files.write_file(folder / "a", {});
  files.write_file(folder / "a", middle, std::array<int64_t, 1>{2});
  files.write_file(folder / "a", std::array<std::string_view, 2>{"ab", "e"}, std::array<int64_t, 2>{0, 4});
  EXPECT_EQ(files.read_file(folder / "a"), "abcde");
}

TEST(FileSystem, ReadsBackEveryByteOfALargeBinaryFile) {
  TemporaryFolder folder;
  std::string content;
  for (int i = 0; i < 300'001; ++i) {
    content += static_cast<char>(i * 7 + i / 251);
  }
  detail::FileSystem& files = detail::FileSystem::real();
  files.write_file(folder / "a", std::array<std::string_view, 1>{content});
  EXPECT_EQ(files.read_file(folder / "a"), content);
}

TEST(FileSystem, ReadsFilesWhoseSizeIsNotKnownBefore) {
  EXPECT_TRUE(detail::FileSystem::real().read_file("/proc/self/stat").size() > 10);
}

TEST(FileSystem, RenamesOverAnExistingFile) {
  TemporaryFolder folder;
  detail::FileSystem& files = detail::FileSystem::real();
  files.write_file(folder / "new", std::array<std::string_view, 1>{"new"});
  files.write_file(folder / "old", std::array<std::string_view, 1>{"old"});
  files.rename(folder / "new", folder / "old");
  files.sync_directory(folder.path());
  EXPECT_EQ(files.read_file(folder / "old"), "new");
  EXPECT_FALSE(files.exists(folder / "new"));
}

TEST(FileSystem, ListsSortedNamesOfFilesAndFolders) {
  TemporaryFolder folder;
  detail::FileSystem& files = detail::FileSystem::real();
  EXPECT_TRUE(files.list(folder.path()).empty());
  for (const char* name : {"b", "a10", "a9", ".hidden"}) {
    files.write_file(folder / name, {});
  }
  files.create_directories(folder / "c");
  EXPECT_EQ(files.list(folder.path()), (std::vector<std::string>{".hidden", "a10", "a9", "b", "c"}));
}

TEST(FileSystem, CreatesAndRemovesNestedFoldersAndTakesRepetition) {
  TemporaryFolder folder;
  detail::FileSystem& files = detail::FileSystem::real();
  files.create_directories(folder / "x/y/z");
  files.create_directories(folder / "x/y/z");
  files.write_file(folder / "x/y/z/file", kParts);
  EXPECT_TRUE(files.exists(folder / "x/y"));
  files.remove_all(folder / "x");
  files.remove_all(folder / "x");
  EXPECT_FALSE(files.exists(folder / "x"));
}

TEST(FileSystem, CountsADanglingLinkAsAnExistingName) {
  TemporaryFolder folder;
  std::filesystem::create_symlink("nowhere", folder / "link");
  EXPECT_TRUE(detail::FileSystem::real().exists(folder / "link"));
}

TEST(FileSystem, ReportsAFullDiskWithPathAndReason) {
  if (!std::filesystem::exists("/dev/full")) {
    GTEST_SKIP() << "needs /dev/full";
  }
  const std::string error = error_of([] { detail::FileSystem::real().write_file("/dev/full", kParts); });
  EXPECT_TRUE(mentions(error, "FileSystem.write_file: /dev/full: ")) << error;
  EXPECT_TRUE(mentions(error, "No space left on device")) << error;
}

TEST(FileSystem, NamesThePathAndTheReasonOfEveryFailure) {
  TemporaryFolder folder;
  detail::FileSystem& files = detail::FileSystem::real();
  files.write_file(folder / "file", kParts);
  const auto absent = folder / "absent";
  const auto below_a_file = folder / "file/below";
  const auto expect = [](const std::string& error, const std::filesystem::path& path, std::string_view reason) {
    EXPECT_TRUE(mentions(error, path.string()) && mentions(error, reason)) << error;
  };
  expect(error_of([&] { files.write_file(absent / "a", kParts); }), absent / "a", "No such file");
  expect(error_of([&] { files.write_file(folder.path(), kParts); }), folder.path(), "Is a directory");
  expect(error_of([&] { files.rename(absent, folder / "b"); }), absent, "No such file");
  expect(error_of([&] { files.sync_directory(absent); }), absent, "No such file");
  expect(error_of([&] { files.sync_directory(folder / "file"); }), folder / "file", "Not a directory");
  expect(error_of([&] { files.create_directories(below_a_file); }), below_a_file, "Not a directory");
  expect(error_of([&] { (void)files.list(absent); }), absent, "No such file");
  expect(error_of([&] { (void)files.read_file(absent); }), absent, "No such file");
  expect(error_of([&] { (void)files.read_file(folder.path()); }), folder.path(), "Is a directory");
}

TEST(FileSystem, TellsAnAbsentNameFromOneThatCannotBeLookedUp) {
  TemporaryFolder folder;
  EXPECT_FALSE(detail::FileSystem::real().exists(folder / "absent"));
  const std::string too_long(5000, 'x');
  EXPECT_THROW((void)detail::FileSystem::real().exists(folder / too_long), Error);
}

TEST(FileSystem, WritesToNoFileThatALinkOfTheNameLeadsTo) {
  TemporaryFolder folder;
  detail::FileSystem& files = detail::FileSystem::real();
  files.write_file(folder / "elsewhere", kParts);
  std::filesystem::create_symlink(folder / "elsewhere", folder / "link");
  EXPECT_THROW(files.write_file(folder / "link", {}), Error);
  EXPECT_EQ(files.read_file(folder / "elsewhere"), "headbody");
}

TEST(ReplaceFile, LetsSeveralReplaceTheSameFileAtOnce) {
  TemporaryFolder folder;
  const auto path = folder / "file";
  const std::array contents{std::string(1 << 16, 'a'), std::string(1 << 17, 'b')};
  detail::replace_file(path, contents[0]);
  std::atomic<int> writing = 2;
  const auto write = [&](const std::string& content) {
    std::string error = "no error";
    for (int i = 0; i < 20; ++i) {
      error = error == "no error" ? error_of([&] { detail::replace_file(path, content); }) : error;
    }
    --writing;
    return error;
  };
  auto first = std::async(std::launch::async, write, contents[0]);
  auto second = std::async(std::launch::async, write, contents[1]);
  while (writing > 0) {
    const std::string found = detail::FileSystem::real().read_file(path);
    EXPECT_TRUE(found == contents[0] || found == contents[1]);
  }
  EXPECT_EQ(first.get(), "no error");
  EXPECT_EQ(second.get(), "no error");
  EXPECT_EQ(detail::FileSystem::real().list(folder.path()), std::vector<std::string>{"file"});
}

TEST(ReplaceFile, LeavesAfterAKillWhatCanBeToldAndRemoved) {
  TemporaryFolder folder;
  FailingFileSystem dies({.fail_at = 2, .then_dead = true});
  EXPECT_THROW(detail::replace_file(folder / "file", "text", dies), Error);
  detail::FileSystem::real().write_file(folder / "file.txt", {});
  const auto names = detail::FileSystem::real().list(folder.path());
  ASSERT_EQ(names.size(), 2u);
  EXPECT_TRUE(detail::is_unfinished(names[0], folder / "file"));
  EXPECT_FALSE(detail::is_unfinished(names[1], folder / "file"));
  detail::remove_unfinished(folder / "file");
  detail::remove_unfinished(folder / "absent/file");
  EXPECT_EQ(detail::FileSystem::real().list(folder.path()), std::vector<std::string>{"file.txt"});
}

TEST(ReplaceFile, TakesAnyNameThatAFileMayHave) {
  const TemporaryFolder folder;
  for (const size_t size : {234, 235, 254, 255}) {
    SCOPED_TRACE(size);
    const std::string name(size, 'n');
    detail::replace_file(folder / name, "text");
    EXPECT_EQ(detail::FileSystem::real().list(folder.path()), std::vector{name});
    EXPECT_EQ(detail::FileSystem::real().read_file(folder / name), "text");
    detail::FileSystem::real().remove_all(folder / name);
  }
  EXPECT_THROW(detail::replace_file(folder / std::string(256, 'n'), "text"), Error);
  EXPECT_EQ(detail::FileSystem::real().list(folder.path()), std::vector<std::string>{});
}

TEST(ReplaceFile, ShortensALongNameBetweenCharactersAndTellsItsUnfinishedFilesFromThoseOfAnother) {
  const TemporaryFolder folder;
  for (size_t ascii = 0; ascii < 3; ++ascii) {  // so that the cut would come at each byte of a character
    std::string name(ascii, 'n');
    while (name.size() <= 250) {
      name += "\u20ac";
    }
    FailingFileSystem dies({.fail_at = 2, .then_dead = true});
    EXPECT_THROW(detail::replace_file(folder / name, "text", dies), Error);
    const auto names = detail::FileSystem::real().list(folder.path());
    ASSERT_EQ(names.size(), 1u);
    EXPECT_EQ((names[0].find('-') - ascii) % 3, 0u) << names[0];
    EXPECT_TRUE(detail::is_unfinished(names[0], folder / name));
    std::string other = name;
    other.back() = '\xad';
    EXPECT_FALSE(detail::is_unfinished(names[0], folder / other));
    detail::remove_unfinished(folder / name);
    EXPECT_EQ(detail::FileSystem::real().list(folder.path()), std::vector<std::string>{});
  }
}

TEST(FailingFileSystem, FailsOnlyTheChosenOperationAndWritesHalfTheFile) {
  TemporaryFolder folder;
  FailingFileSystem files({.fail_at = 2});
  files.create_directories(folder / "x");
  EXPECT_THROW(files.write_file(folder / "x/a", kParts), Error);
  EXPECT_EQ(files.read_file(folder / "x/a"), "head");
  files.write_file(folder / "x/a", kParts);
  EXPECT_EQ(files.read_file(folder / "x/a"), "headbody");
  EXPECT_EQ(files.operations(), 3);
}

TEST(FailingFileSystem, ChangesNothingAfterTheFaultWhenTheProcessIsDead) {
  TemporaryFolder folder;
  FailingFileSystem files({.fail_at = 2, .then_dead = true});
  files.write_file(folder / "a", kParts);
  EXPECT_THROW(files.rename(folder / "a", folder / "b"), Error);
  EXPECT_THROW(files.write_file(folder / "b", kParts), Error);
  EXPECT_THROW(files.remove_all(folder / "a"), Error);
  EXPECT_THROW(files.create_directories(folder / "c"), Error);
  EXPECT_THROW(files.sync_directory(folder.path()), Error);
  EXPECT_EQ(files.list(folder.path()), std::vector<std::string>{"a"});
}

TEST(FailingFileSystem, OnlyCountsWhenNothingIsToFail) {
  TemporaryFolder folder;
  FailingFileSystem files({});
  files.write_file(folder / "a", kParts);
  files.rename(folder / "a", folder / "b");
  files.sync_directory(folder.path());
  EXPECT_EQ(files.operations(), 3);
  EXPECT_TRUE(files.exists(folder / "b"));
}

}  // namespace
}  // namespace snug::file_system_test
