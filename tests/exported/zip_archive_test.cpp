// Archives of records that lie in them as they are, made here byte by byte, and damaged.

#include "src/exported/zip_archive.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "src/core/file_system.h"
#include "tests/exported/zip_bytes.h"
#include "tests/support/temporary_folder.h"

namespace snug::zip_archive_test {
namespace {

using detail::ZipArchive;
using Record = testing::ZipRecord;
using testing::bytes;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::zip_of;

class ZipArchives : public ::testing::Test {
 protected:
  ZipArchive open(const std::string& content) {
    detail::replace_file(folder_ / "a.pt2", content);
    return ZipArchive(folder_ / "a.pt2");
  }

  std::string error_of(const std::string& content, const std::string& record = {}) {
    try {
      const ZipArchive archive = open(content);
      return record.empty() ? "" : archive.text(record, 100);
    } catch (const CorruptFile& error) {
      return error.what();
    }
  }

  testing::TemporaryFolder folder_;
};

const std::vector<Record> kTwo{{.name = "m/a", .data = "first"}, {.name = "m/b/c", .data = "second"}};

TEST_F(ZipArchives, GiveTheirRecordsByNameWithoutTheFolder) {
  const ZipArchive archive = open(zip_of(kTwo));
  EXPECT_THAT(archive.names(), ElementsAre("a", "b/c"));
  EXPECT_EQ(archive.size("b/c"), 6);
  EXPECT_EQ(archive.text("a", 5), "first");
  EXPECT_EQ(archive.text("b/c", 6), "second");
}

TEST_F(ZipArchives, ReadSizesOf64Bits) {
  const std::string field = bytes<uint16_t>(1) + bytes<uint16_t>(16) + bytes<uint64_t>(5) + bytes<uint64_t>(5);
  const auto content =
      zip_of({{.name = "m/a", .data = "first", .packed = 0xFFFFFFFF, .extra = field, .size = 0xFFFFFFFF}});
  EXPECT_EQ(open(content).text("a", 5), "first");
}

TEST_F(ZipArchives, CutShortAnywhereAreCorrupt) {
  const std::string whole = zip_of(kTwo);
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(error_of(whole.substr(0, size)), "") << size;
  }
}

TEST_F(ZipArchives, WithOneByteChangedAreCorruptOrReadAsBefore) {
  const std::string whole = zip_of(kTwo);
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 0xFF);
    const std::string result = error_of(damaged, "a");
    EXPECT_TRUE(result == "first" || result.size() > 10) << i << ": " << result;
  }
}

TEST_F(ZipArchives, RefuseWhatTorchDoesNotWrite) {
  const std::vector<std::pair<std::vector<Record>, std::string>> cases{
      {{{.name = "m/../a", .data = "x"}}, "leads out"},
      {{{.name = "/a", .data = "x"}}, "leads out"},
      {{{.name = "m\\a", .data = "x"}}, "leads out"},
      {{{.name = "m/a", .data = "x", .method = 8}}, "compressed"},
      {{{.name = "m/a", .data = "x", .flags = 1}}, "encrypted"},
      {{{.name = "m/a", .data = "x", .packed = 7}}, "compressed"},
      {{{.name = "m/a", .data = "x"}, {.name = "m/a", .data = "y"}}, "twice"},
      {{{.name = "m/a", .data = "x"}, {.name = "n/a", .data = "y"}}, "outside the folder"},
      {{{.name = "a", .data = "x"}}, "outside the folder"},
      {{{.name = "m/a", .data = "x", .packed = 1'000'000'000, .size = 1'000'000'000}}, "no room"},
      {{{.name = "m/a", .data = "x", .offset = 1'000'000'000}}, "no room"},
      {{{.name = "m/a", .data = "xxxx"}, {.name = "m/b", .data = "y", .packed = 70, .size = 70}}, "no room"},
      {{{.name = "m/a", .data = "x", .packed = 0xFFFFFFFF, .extra = bytes<uint32_t>(1), .size = 0xFFFFFFFF}},
       "ends within"},
  };
  for (const auto& [records, reason] : cases) {
    EXPECT_THAT(error_of(zip_of(records)), HasSubstr(reason)) << records[0].name;
  }
}

TEST_F(ZipArchives, FindRecordsThatAreNotWhereTheyShouldBe) {
  auto records = kTwo;
  records[1].offset = 1;
  EXPECT_THAT(error_of(zip_of(records), "b/c"), HasSubstr("does not lie where"));
  EXPECT_THAT(error_of(zip_of(kTwo), "z"), HasSubstr("has no record 'z'"));
  EXPECT_THAT(error_of(zip_of({{.name = "m/a", .data = std::string(101, 'x')}}), "a"), HasSubstr("101 bytes"));
}

}  // namespace
}  // namespace snug::zip_archive_test
