#include "program/datasets/text_corpus.h"

#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "tests/support/temporary_folder.h"

namespace snug::text_corpus_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;
namespace fs = std::filesystem;

fs::path write(const fs::path& path, std::string_view text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

std::string text_of(const TextCorpus& corpus, Split split) {
  const at::Tensor& bytes = corpus.tokens(split);
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

// Row `row` of int64 [n, length], as text.
std::string text_of(const at::Tensor& rows, int64_t row) {
  std::string text;
  for (int64_t i = 0; i < rows.size(1); ++i) {
    text += static_cast<char>(rows.const_data_ptr<int64_t>()[row * rows.size(1) + i]);
  }
  return text;
}

TEST(TextCorpus, HoldsOutTheEndOfEachFile) {
  TemporaryFolder folder;
  const auto corpus =
      TextCorpus::load({write(folder / "1.txt", "abcdefghij"), write(folder / "2.txt", "ABCDEFGHIJKLMNOPQRST")}, 0.2);
  EXPECT_EQ(text_of(corpus, Split::Train), "abcdefghABCDEFGHIJKLMNOP");
  EXPECT_EQ(text_of(corpus, Split::Validation), "ijQRST");
  EXPECT_EQ(corpus.train_size(), 24);
  EXPECT_EQ(corpus.validation_size(), 6);
}

TEST(TextCorpus, ReadsTokensOf16Bits) {
  TemporaryFolder folder;
  std::string file;
  for (const int token : {1, 300, 65535, 7, 40000}) {
    file += {static_cast<char>(token & 255), static_cast<char>(token >> 8)};
  }
  const auto corpus = TextCorpus::load({write(folder / "train.bin", file)}, 0.2, {}, TokenType::UInt16);
  EXPECT_EQ(corpus.train_size(), 4);
  EXPECT_EQ(corpus.validation_size(), 1);
  const auto [input, target] = corpus.windows(std::vector<int64_t>{0, 1}, 2, Split::Train);
  EXPECT_TRUE(at::equal(input, at::tensor({1, 300, 300, 65535}, at::kLong).view({2, 2})));
  EXPECT_TRUE(at::equal(target, at::tensor({300, 65535, 65535, 7}, at::kLong).view({2, 2})));
  EXPECT_THAT([&] { TextCorpus::load({write(folder / "odd.bin", "abc")}, 0.2, {}, TokenType::UInt16); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("odd.bin"), HasSubstr("3 bytes"))));
}

TEST(TextCorpus, DoesNotLookIntoTheFolderThatIsLeftOut) {
  TemporaryFolder folder;
  write(folder / "a/1.txt", "abcdefghij");
  write(folder / "a/run/log", "this is no text of the corpus");
  write(folder / "a/run/below/part", "nor is this");
  write(folder / "a/runs", "ABCDEFGHIJ");
  fs::create_directory_symlink(folder / "a/run", folder / "link");
  for (const fs::path& left_out : {folder / "a/run", folder / "a/../a/run/", folder / "link"}) {
    EXPECT_EQ(text_of(TextCorpus::load({folder / "a"}, 0.1, left_out), Split::Train), "abcdefghiABCDEFGHI") << left_out;
  }
  EXPECT_EQ(TextCorpus::load({folder / "a"}, 0, folder / "absent").train_size(), 60);
  EXPECT_EQ(TextCorpus::load({folder / "a/run/log"}, 0, folder / "a/run").train_size(), 29) << "it was asked for";
}

TEST(TextCorpus, ReadsFoldersSortedByPathAndPathsInTheOrderGiven) {
  TemporaryFolder folder;
  write(folder / "plays/b.txt", "B");
  write(folder / "plays/a/2.txt", "2");
  write(folder / "plays/a/10.txt", "1");
  write(folder / "plays/empty", "");
  const fs::path last = write(folder / "last.txt", "L");
  const fs::path first = write(folder / "first.txt", "F");
  fs::create_symlink(folder / "nowhere", folder / "plays/dangling");
  const auto corpus = TextCorpus::load({first, folder / "plays", last}, 0);
  EXPECT_EQ(text_of(corpus, Split::Train), "F12BL");
}

TEST(TextCorpus, KeepsEveryByteAsItIs) {
  TemporaryFolder folder;
  std::string all(256, '\0');
  std::iota(all.begin(), all.end(), '\0');
  const auto corpus = TextCorpus::load({write(folder / "bytes", all)}, 0);
  EXPECT_EQ(text_of(corpus, Split::Train), all);
  const auto [input, target] = corpus.windows(std::vector<int64_t>{0}, 255, Split::Train);
  EXPECT_EQ(input.const_data_ptr<int64_t>()[254], 254);
  EXPECT_EQ(target.const_data_ptr<int64_t>()[254], 255);
}

TEST(TextCorpus, GivesWindowsAndTheirTargetsOneByteFurther) {
  TemporaryFolder folder;
  const auto corpus = TextCorpus::load({write(folder / "text", "abcdefgh")}, 0);
  ASSERT_EQ(corpus.number_of_windows(3, Split::Train), 5);
  const std::vector<int64_t> starts{4, 0, 4};
  const auto [input, target] = corpus.windows(starts, 3, Split::Train);
  EXPECT_EQ(input.sizes(), (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(target.sizes(), input.sizes());
  EXPECT_EQ(input.scalar_type(), at::kLong);
  EXPECT_EQ(target.scalar_type(), at::kLong);
  EXPECT_EQ(text_of(input, 0), "efg");
  EXPECT_EQ(text_of(target, 0), "fgh");
  EXPECT_EQ(text_of(input, 1), "abc");
  EXPECT_EQ(text_of(target, 1), "bcd");
  EXPECT_EQ(text_of(input, 2), "efg");
  EXPECT_EQ(corpus.windows({}, 3, Split::Train).first.size(0), 0);
}

// Each byte tells by its case which part it belongs to.
TEST(TextCorpus, NeverLetsATrainingWindowSeeHeldOutText) {
  TemporaryFolder folder;
  for (int i = 0; i < 5; ++i) {
    write(folder / std::to_string(i), std::string(80, 'a') + std::string(20, 'Z'));
  }
  const auto corpus = TextCorpus::load({folder.path()}, 0.2);
  for (const Split split : {Split::Train, Split::Validation}) {
    std::vector<int64_t> starts(static_cast<size_t>(corpus.number_of_windows(30, split)));
    std::iota(starts.begin(), starts.end(), 0);
    const auto [input, target] = corpus.windows(starts, 30, split);
    const int64_t only = split == Split::Train ? 'a' : 'Z';
    EXPECT_TRUE(input.eq(only).all().item<bool>());
    EXPECT_TRUE(target.eq(only).all().item<bool>());
  }
}

TEST(TextCorpus, SpreadsWindowsEvenlyFromTheFirstToTheLast) {
  TemporaryFolder folder;
  const auto corpus = TextCorpus::load({write(folder / "text", std::string(1000, 'x'))}, 0.1);
  EXPECT_THAT(corpus.evenly_spread(4, 9, Split::Validation), ElementsAre(0, 30, 60, 90));
  EXPECT_THAT(corpus.evenly_spread(1, 9, Split::Validation), ElementsAre(0));
  EXPECT_THAT(corpus.evenly_spread(9, 97, Split::Validation), ElementsAre(0, 1, 2));
  const auto many = corpus.evenly_spread(100, 10, Split::Train);
  EXPECT_EQ(std::set<int64_t>(many.begin(), many.end()).size(), 100u);
  EXPECT_EQ(many.back(), 889);
  EXPECT_EQ(many, corpus.evenly_spread(100, 10, Split::Train));
}

TEST(TextCorpus, RefusesPathsWithoutText) {
  TemporaryFolder folder;
  const auto loading = [](const fs::path& path) { return [=] { TextCorpus::load({path}); }; };
  const auto refused = [](const fs::path& path, const std::string& what) {
    return ThrowsMessage<ConfigError>(AllOf(HasSubstr(path.string()), HasSubstr(what)));
  };
  EXPECT_THAT(loading(folder / "absent.txt"), refused(folder / "absent.txt", "does not exist"));
  const fs::path empty = write(folder / "empty.txt", "");
  EXPECT_THAT(loading(empty), refused(empty, "is empty"));
  EXPECT_THAT(loading(folder.path()), refused(folder.path(), "folder without text"));
  EXPECT_THAT(loading("/dev/null"), refused("/dev/null", "neither a file nor a folder"));
  const fs::path tiny = write(folder / "tiny.txt", "123456789");
  EXPECT_THAT(loading(tiny), refused(tiny, "only 9 tokens"));
  EXPECT_THAT([] { TextCorpus::load({}); }, ThrowsMessage<ConfigError>(HasSubstr("no paths")));
}

TEST(TextCorpus, RefusesFractionsOutOfRange) {
  TemporaryFolder folder;
  const fs::path text = write(folder / "text", "0123456789");
  for (const double fraction : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT([&] { TextCorpus::load({text}, fraction); },
                ThrowsMessage<ConfigError>(HasSubstr("validation_fraction")));
  }
}

TEST(TextCorpus, RefusesWindowsThatItDoesNotHave) {
  TemporaryFolder folder;
  const auto corpus = TextCorpus::load({write(folder / "short.txt", std::string(100, 'x'))}, 0.1);
  EXPECT_EQ(corpus.number_of_windows(9, Split::Validation), 1);
  EXPECT_THAT(
      [&] { corpus.number_of_windows(10, Split::Validation); },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("validation part"), HasSubstr("short.txt"), HasSubstr("10 tokens"))));
  EXPECT_THROW(corpus.number_of_windows(0, Split::Train), ConfigError);
  for (const int64_t start : {-1, 90}) {
    EXPECT_THAT(([&] { corpus.windows(std::vector<int64_t>{start}, 1, Split::Train); }),
                ThrowsMessage<ConfigError>(HasSubstr("not in [0, 89)")));
  }
  EXPECT_THROW(corpus.evenly_spread(0, 5, Split::Train), ConfigError);
}

}  // namespace
}  // namespace snug::text_corpus_test
