#include "src/core/unnamed_file.h"

#include <array>
#include <cerrno>
#include <filesystem>
#include <string>

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/support/temporary_folder.h"

namespace snug::detail::unnamed_file_test {
namespace {

using testing::TemporaryFolder;

// As the system tells it: of a file that never had one it begins with '#'.
std::string name_of(int descriptor) {
  return std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", descriptor)).filename().string();
}

TEST(UnnamedFile, IsReadAndWrittenAndInNoFolder) {
  const TemporaryFolder folder;
  for (const auto open : {&open_unnamed, &open_and_unlink}) {
    const int file = open(folder.path());
    ASSERT_GE(file, 0);
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    std::array<char, 3> read{};
    EXPECT_EQ(::pwrite(file, "abc", 3, 0), 3);
    EXPECT_EQ(::pread(file, read.data(), 3, 0), 3);
    EXPECT_EQ(std::string(read.begin(), read.end()), "abc");
    ::close(file);
  }
}

TEST(UnnamedFile, HadNoNameForAKillToLeaveBehind) {
  const TemporaryFolder folder;
  const int probe = ::open(folder.path().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (probe < 0) {
    GTEST_SKIP() << "this file system has no O_TMPFILE";
  }
  ::close(probe);
  const int file = open_unnamed(folder.path()), named = open_and_unlink(folder.path());
  EXPECT_THAT(name_of(file), ::testing::StartsWith("#"));
  EXPECT_THAT(name_of(named), ::testing::StartsWith(std::string(kUnnamedPrefix)));
  ::close(file);
  ::close(named);
}

TEST(UnnamedFile, SaysWhyThereCanBeNone) {
  const TemporaryFolder folder;
  for (const auto open : {&open_unnamed, &open_and_unlink}) {
    errno = 0;
    EXPECT_EQ(open(folder / "absent"), -1);
    EXPECT_EQ(errno, ENOENT);
  }
}

}  // namespace
}  // namespace snug::detail::unnamed_file_test
