// Event files, byte by byte. That TensorBoard reads them is tested in tests/cli/tensorboard_test.py.

#include "program/report/tensorboard.h"

#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "snug/core.h"
#include "src/core/file_system.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/null_file_system.h"
#include "tests/support/temporary_folder.h"

namespace snug::tensorboard_test {
namespace {

using testing::FileSizeLimit;
using testing::NullFileSystem;
using testing::TemporaryFolder;

// CRC-32C by the polynomial as it is written, the highest power first, on bits that are turned around: another way than
// the library's.
uint32_t checksum(std::string_view bytes) {
  uint64_t remainder = 0xffffffff;
  for (const char letter : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      const bool next = ((static_cast<unsigned char>(letter) >> bit) & 1) != 0;
      const bool carry = ((remainder >> 31) & 1) != 0;
      remainder = ((remainder << 1) & 0xffffffff) ^ (next != carry ? 0x1edc6f41 : 0);
    }
  }
  uint32_t turned = 0;
  for (int bit = 0; bit < 32; ++bit) {
    turned |= static_cast<uint32_t>((remainder >> bit) & 1) << (31 - bit);
  }
  return ~turned;
}

template <class T>
T number_at(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));  // on machines that are little-endian
  return value;
}

// The data of the records; fails where a length or checksum is wrong.
std::vector<std::string> records_of(const std::string& content) {
  const auto mask = [](uint32_t crc) { return std::rotl(crc, 17) + 0xa282ead8u; };
  std::vector<std::string> records;
  for (size_t at = 0; at < content.size();) {
    const auto length = number_at<uint64_t>(content, at);
    if (at + 16 + length > content.size()) {
      ADD_FAILURE() << "a record ends behind the file";
      break;
    }
    const std::string data = content.substr(at + 12, length);
    EXPECT_EQ(number_at<uint32_t>(content, at + 8), mask(checksum(content.substr(at, 8))));
    EXPECT_EQ(number_at<uint32_t>(content, at + 12 + length), mask(checksum(data)));
    records.push_back(data);
    at += 16 + length;
  }
  return records;
}

std::string content_of(const TensorBoardFile& board) { return detail::FileSystem::real().read_file(board.path()); }

TEST(TensorBoardFile, FramesItsRecordsWithTheirLengthAndChecksums) {
  ASSERT_EQ(checksum("123456789"), 0xe3069283u);  // the check value of CRC-32C
  const TemporaryFolder folder;
  TensorBoardFile board(folder / "new/boards");
  board.write({.step = 3, .loss = 2.5});
  board.write({.step = 4, .loss = 2.25});
  const std::vector<std::string> records = records_of(content_of(board));
  ASSERT_EQ(records.size(), 4u);  // version, start, two steps
  EXPECT_EQ(records[0].substr(9), std::string("\x10\0\x1a\x0d", 4) + "brain.Event:2");
  EXPECT_EQ(records[1].substr(9), std::string("\x10\x03\x3a\x02\x08\x01"));
  EXPECT_NE(records[2].find(std::string("\x0a\x0dloss/training\x15", 16) + std::string("\0\0\x20\x40", 4)),
            std::string::npos);
}

TEST(TensorBoardFile, LeavesOutWhatARecordDoesNotHave) {
  const TemporaryFolder folder;
  TensorBoardFile board(folder.path());
  board.write({.step = 1});
  board.write({.step = 2, .validation_loss = 1, .gradient_noise_scale = 2, .communication = Communication{}});
  const std::vector<std::string> records = records_of(content_of(board));
  for (const char* tag : {"loss/held_out", "training/gradient_noise_scale", "communication/waited"}) {
    EXPECT_EQ(records[2].find(tag), std::string::npos) << tag;
    EXPECT_NE(records[3].find(tag), std::string::npos) << tag;
  }
}

TEST(TensorBoardFile, WritesNumbersBeyondFp32AsInfinity) {
  const TemporaryFolder folder;
  TensorBoardFile board(folder.path());
  board.write({.step = 1, .loss = 1e300, .learning_rate = -1e300, .grad_norm = 0x1.fffffep127});
  const std::string record = records_of(content_of(board))[2];
  const auto value_of = [&](const std::string& tag) {
    return number_at<float>(record, record.find(tag) + tag.size() + 1);
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(value_of("loss/training"), kInfinity);
  EXPECT_EQ(value_of("training/learning_rate"), -kInfinity);
  EXPECT_EQ(value_of("training/gradient_norm"), std::numeric_limits<float>::max());
}

TEST(TensorBoardFile, BeginsWithTheStartAlsoWhenItDidNotFitAtFirst) {
  const TemporaryFolder folder;
  TensorBoardFile board(folder.path());
  const std::string before = content_of(board);
  {
    const FileSizeLimit limit(before.size() + 20);
    EXPECT_THROW(board.write({.step = 3}), Error);
  }
  EXPECT_EQ(content_of(board), before);
  board.write({.step = 4});
  const std::vector<std::string> records = records_of(content_of(board));
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[1].substr(9), std::string("\x10\x04\x3a\x02\x08\x01"));
}

TEST(TensorBoardFile, LeavesNoFileBehindWhoseFirstRecordDidNotFit) {
  const TemporaryFolder folder;
  {
    const FileSizeLimit limit(20);
    EXPECT_THROW(TensorBoardFile(folder.path()), Error);
  }
  EXPECT_TRUE(detail::FileSystem::real().list(folder.path()).empty());
}

TEST(TensorBoardFile, HasANameBehindThoseOfFilesThatAreThere) {
  const TemporaryFolder folder;
  const TensorBoardFile first(folder.path()), second(folder.path());
  EXPECT_LT(first.path().filename().string(), second.path().filename().string());
  detail::FileSystem::real().write_file(folder / "events.out.tfevents.7999999999.host", {});
  EXPECT_EQ(TensorBoardFile(folder.path()).path().filename(), "events.out.tfevents.8000000000.snug");
}

TEST(TensorBoardFile, TakesNumbersOfMoreThanTenDigitsForNoTime) {
  const TemporaryFolder folder;
  const std::string usual = TensorBoardFile(folder.path()).path().filename().string();
  for (const char* number : {"9223372036854775807", "99999999999999999999", "10000000000"}) {
    detail::FileSystem::real().write_file(folder / ("events.out.tfevents." + std::string(number) + ".host"), {});
    EXPECT_EQ(TensorBoardFile(folder.path()).path().filename().string().size(), usual.size()) << number;
  }
}

TEST(TensorBoardFile, TakesTheNextNameIfAnotherRunHasTakenItsOwn) {
  NullFileSystem files;  // sees no files, as if they were made just after it looked
  const TemporaryFolder folder;
  const TensorBoardFile first(folder.path(), files), second(folder.path(), files), third(folder.path(), files);
  EXPECT_LT(first.path(), second.path());
  EXPECT_LT(second.path(), third.path());
}

TEST(TensorBoardFile, ThatCannotBeMadeIsAnErrorWithItsPath) {
  const TemporaryFolder folder;
  detail::FileSystem::real().write_file(folder / "file", {});
  try {
    const TensorBoardFile board(folder / "file");
    FAIL() << "made a folder of a file";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find((folder / "file").string()), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace snug::tensorboard_test
