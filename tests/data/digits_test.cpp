#include "program/datasets/digits.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <ATen/ops/bincount.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "tests/support/temporary_folder.h"

namespace snug::digits_test {
namespace {

using ::testing::HasSubstr;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;
namespace fs = std::filesystem;

std::string idx(std::initializer_list<uint8_t> sizes, const std::string& content) {
  std::string text{0, 0, 8, static_cast<char>(sizes.size())};
  for (const uint8_t size : sizes) {
    text += std::string{0, 0, 0, static_cast<char>(size)};
  }
  return text + content;
}

struct Files {
  TemporaryFolder folder;
  // Two pictures of 2 x 3, of a 7 and a 9.
  std::string images = idx({2, 2, 3}, std::string("\x00\xff\x33\x00\x00\x00\x01\x02\x03\x04\x05\x06", 12));
  std::string labels = idx({2}, "\x07\x09");

  Digits load() const {
    std::ofstream(folder / "images-idx3-ubyte", std::ios::binary) << images;
    std::ofstream(folder / "labels-idx1-ubyte", std::ios::binary) << labels;
    return load_digits(folder.path());
  }
};

TEST(LoadDigits, GivesPicturesFromZeroToOneAndLabels) {
  const Digits digits = Files().load();
  ASSERT_EQ(digits.images.sizes(), (std::vector<int64_t>{2, 1, 2, 3}));
  EXPECT_EQ(digits.images.scalar_type(), at::kFloat);
  EXPECT_EQ(digits.images[0][0][0][1].item<float>(), 1.0F);
  EXPECT_EQ(digits.images[0][0][0][2].item<float>(), 0.2F);
  EXPECT_EQ(digits.images[1][0][1][2].item<float>(), 6.0F / 255);
  EXPECT_EQ(digits.labels.scalar_type(), at::kLong);
  EXPECT_EQ(digits.labels[0].item<int64_t>(), 7);
  EXPECT_EQ(digits.labels[1].item<int64_t>(), 9);
}

TEST(LoadDigits, RefusesFilesThatAreNotWhatTheirHeaderSays) {
  const auto expect = [](const Files& files, const std::string& what) {
    EXPECT_THAT([&] { files.load(); }, ThrowsMessage<CorruptFile>(HasSubstr(what)));
  };
  Files files;
  expect({.images = files.labels}, "begins with 0x00000801, not 0x00000803");
  expect({.labels = std::string("\0\0\b", 3)}, "labels-idx1-ubyte ends within its header");
  expect({.images = files.images.substr(0, files.images.size() - 1)},
         "is 27 bytes long, which does not fit its header's [2, 2, 3]");
  expect({.images = files.images + "x"}, "is 29 bytes long");
  expect({.images = idx({0, 2, 3}, "")}, "[0, 2, 3]");
  expect({.images = idx({}, "").replace(3, 1, "\x03") + std::string(12, '\xff')}, "4294967295");
  expect({.labels = idx({1}, "\x07")}, "has 1 labels for 2 pictures");
  expect({.labels = idx({2}, "\x07\x0a")}, "picture 1 shows 10");
}

TEST(LoadDigits, NamesAMissingFileAndWhereItComesFrom) {
  TemporaryFolder folder;
  EXPECT_THAT([&] { load_digits(folder.path()); },
              ThrowsMessage<ConfigError>(::testing::AllOf(HasSubstr("images-idx3-ubyte"), HasSubstr("script/setup"))));
}

TEST(LoadDigits, ReadsTheDigitsThatSetUpFetches) {
  const fs::path folder = fs::path(__FILE__).parent_path() / "../../build/data/digits";
  if (!fs::is_directory(folder)) {
    GTEST_SKIP() << folder << " is not there; script/setup fetches it";
  }
  const Digits digits = load_digits(folder);
  EXPECT_EQ(digits.images.sizes(), (std::vector<int64_t>{5000, 1, 28, 28}));
  EXPECT_TRUE(at::equal(at::bincount(digits.labels.narrow(0, 0, 100)), at::full({10}, 10, at::kLong)))
      << "they take turns";
}

}  // namespace
}  // namespace snug::digits_test
