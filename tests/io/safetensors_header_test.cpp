#include "src/io/safetensors_header.h"

#include <cstring>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::detail::safetensors_header_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr const char* kFile = "weights.safetensors";

std::string prefix_of(uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes;
}

auto parsing(const std::string& json, int64_t data_size) {
  return [=] { return parse_safetensors_header(json, data_size, kFile); };
}

auto is_corrupt(const std::string& what) {
  return ThrowsMessage<CorruptFile>(AllOf(HasSubstr(kFile), HasSubstr(what), HasSubstr("damaged")));
}

TEST(SafetensorsHeader, ReadsBackWhatItWrote) {
  const SafetensorsHeader header{.metadata = {{"a", "1"}, {"ä \"quoted\"\n", ""}},
                                 .tensors = {{.name = "w", .dtype = "F64", .shape = {2, 3}, .begin = 0, .end = 48},
                                             {.name = "none", .dtype = "F32", .shape = {0, 5}, .begin = 48, .end = 48},
                                             {.name = "scalar", .dtype = "BF16", .shape = {}, .begin = 48, .end = 50}}};
  const std::string bytes = format_safetensors_header(header, kFile);
  EXPECT_EQ(bytes.size() % 8, 0u);
  const int64_t length = parse_safetensors_length(bytes, std::ssize(bytes) + 50, kFile);
  ASSERT_EQ(length, std::ssize(bytes) - 8);
  const auto read = parse_safetensors_header(bytes.substr(8), 50, kFile);
  EXPECT_EQ(read.metadata, header.metadata);
  ASSERT_EQ(read.tensors.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(read.tensors[i].name, header.tensors[i].name);
    EXPECT_EQ(read.tensors[i].dtype, header.tensors[i].dtype);
    EXPECT_EQ(read.tensors[i].shape, header.tensors[i].shape);
    EXPECT_EQ(read.tensors[i].begin, header.tensors[i].begin);
    EXPECT_EQ(read.tensors[i].end, header.tensors[i].end);
  }
}

TEST(SafetensorsHeader, WritesTheBytesThatTheFormatAsksFor) {
  const SafetensorsHeader header{.metadata = {},
                                 .tensors = {{.name = "w", .dtype = "F32", .shape = {1, 2}, .begin = 0, .end = 8}}};
  const std::string json = R"({"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})";
  ASSERT_EQ(json.size(), 56u);
  EXPECT_EQ(format_safetensors_header(header, kFile), prefix_of(56) + json);
  const std::string with_padding = format_safetensors_header({.metadata = {{"k", "v"}}, .tensors = {}}, kFile);
  EXPECT_EQ(with_padding, prefix_of(32) + R"({"__metadata__":{"k":"v"}})" + std::string(6, ' '));
}

TEST(SafetensorsHeader, AcceptsEntriesInAnyOrderAndSortsThemByOffset) {
  const auto header = parse_safetensors_header(
      R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},
          "b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
      3, kFile);
  EXPECT_EQ(header.tensors.at(0).name, "b");
  EXPECT_EQ(header.tensors.at(1).name, "a");
}

TEST(SafetensorsHeader, RefusesBadLengths) {
  const auto reading = [](const std::string& prefix, int64_t size) {
    return [=] { return parse_safetensors_length(prefix, size, kFile); };
  };
  EXPECT_THAT(reading("", 0), is_corrupt("the file has 0 bytes"));
  EXPECT_THAT(reading("1234567", 7), is_corrupt("the file has 7 bytes"));
  EXPECT_THAT(reading(prefix_of(3), 10), is_corrupt("given as 3 bytes, but the file has 10"));
  EXPECT_THAT(reading(prefix_of(100'000'001), int64_t{1} << 40), is_corrupt("the format allows"));
  EXPECT_THAT(reading(prefix_of(~uint64_t{0}), 100), is_corrupt("18446744073709551615"));
  EXPECT_EQ(parse_safetensors_length(prefix_of(2), 10, kFile), 2);
}

TEST(SafetensorsHeader, RefusesWhatIsNotAHeader) {
  EXPECT_THAT(parsing("", 0), is_corrupt("is not JSON"));
  EXPECT_THAT(parsing("{\"w\":", 0), is_corrupt("is not JSON"));
  EXPECT_THAT(parsing(std::string("{}\0", 3), 0), is_corrupt("is not JSON"));
  EXPECT_THAT(parsing("{\"\xff\": 1}", 0), is_corrupt("is not JSON"));
  EXPECT_THAT(parsing("[]", 0), is_corrupt("not a JSON object"));
  EXPECT_THAT(parsing("7", 0), is_corrupt("not a JSON object"));
  EXPECT_THAT(parsing("{\"w\": 1}", 0), is_corrupt("entry of tensor 'w'"));
  EXPECT_THAT(parsing("{\"w\": [[[[[1]]]]]}", 0), is_corrupt("nested deeper"));
  EXPECT_THAT(parsing(std::string(1'000'000, '['), 0), is_corrupt("nested deeper"));
}

TEST(SafetensorsHeader, RefusesTheSameNameTwice) {
  const std::string entry = R"("w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_THAT(parsing("{" + entry + "," + entry + "}", 1), is_corrupt("'w' is in the header twice"));
  EXPECT_THAT(parsing(R"({"__metadata__":{"k":"1","k":"2"}})", 0), is_corrupt("'k'"));
  EXPECT_THAT(parsing(R"({"w":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1),
              is_corrupt("'dtype'"));
}

TEST(SafetensorsHeader, RefusesBadMetadata) {
  EXPECT_THAT(parsing(R"({"__metadata__": []})", 0), is_corrupt("__metadata__ is not an object"));
  EXPECT_THAT(parsing(R"({"__metadata__": {"epoch": 3}})", 0), is_corrupt("'epoch'"));
}

// An entry of one tensor "w" with the three fields given as JSON.
std::string entry_of(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"w":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

TEST(SafetensorsHeader, RefusesBadDtypes) {
  EXPECT_THAT(parsing(entry_of("\"F33\"", "[1]", "[0,4]"), 4), is_corrupt("\"F33\""));
  EXPECT_THAT(parsing(entry_of("32", "[1]", "[0,4]"), 4), is_corrupt("dtype of tensor 'w' is 32"));
  EXPECT_THAT(parsing(R"({"w":{"shape":[1],"data_offsets":[0,1]}})", 1), is_corrupt("no dtype"));
}

TEST(SafetensorsHeader, RefusesBadShapes) {
  const std::string f32 = "\"F32\"";
  EXPECT_THAT(parsing(entry_of(f32, "2", "[0,8]"), 8), is_corrupt("shape of tensor 'w' is 2"));
  EXPECT_THAT(parsing(entry_of(f32, "[-2]", "[0,8]"), 8), is_corrupt("[-2]"));
  EXPECT_THAT(parsing(entry_of(f32, "[2.0]", "[0,8]"), 8), is_corrupt("[2.0]"));
  EXPECT_THAT(parsing(entry_of(f32, "[\"2\"]", "[0,8]"), 8), is_corrupt("[\"2\"]"));
  EXPECT_THAT(parsing(entry_of(f32, "[9223372036854775808]", "[0,8]"), 8), is_corrupt("9223372036854775808"));
  EXPECT_THAT(parsing(entry_of(f32, "[18446744073709551616]", "[0,8]"), 8), is_corrupt("shape"));
  EXPECT_THAT(parsing(entry_of(f32, "[3]", "[0,8]"), 8), is_corrupt("F32 [3] takes 12 bytes"));
  EXPECT_THAT(parsing(R"({"w":{"dtype":"U8","data_offsets":[0,1]}})", 1), is_corrupt("no shape"));
}

TEST(SafetensorsHeader, RefusesShapesThatOverflow) {
  const std::string huge = "4611686018427387904";  // 2^62
  EXPECT_THAT(parsing(entry_of("\"F32\"", "[" + huge + ",4]", "[0,0]"), 0), is_corrupt("more bytes than there can be"));
  EXPECT_THAT(parsing(entry_of("\"F32\"", "[" + huge + "]", "[0,0]"), 0), is_corrupt("more bytes"));
  EXPECT_THAT(parsing(entry_of("\"F32\"", "[0," + huge + "," + huge + "]", "[0,0]"), 0), is_corrupt("more bytes"));
}

TEST(SafetensorsHeader, RefusesBadOffsets) {
  const std::string u8 = "\"U8\"";
  EXPECT_THAT(parsing(entry_of(u8, "[2]", "[0]"), 2), is_corrupt("not a begin and an end"));
  EXPECT_THAT(parsing(entry_of(u8, "[2]", "[0,1,2]"), 2), is_corrupt("not a begin and an end"));
  EXPECT_THAT(parsing(entry_of(u8, "[2]", "[2,0]"), 2), is_corrupt("not a begin and an end"));
  EXPECT_THAT(parsing(entry_of(u8, "[2]", "[-2,0]"), 2), is_corrupt("data_offsets"));
  EXPECT_THAT(parsing(entry_of(u8, "[2]", "null"), 2), is_corrupt("data_offsets"));
  EXPECT_THAT(parsing(entry_of(u8, "[2]", "[0,3]"), 3), is_corrupt("takes 2 bytes"));
  EXPECT_THAT(parsing(R"({"w":{"dtype":"U8","shape":[1]}})", 1), is_corrupt("no data_offsets"));
}

TEST(SafetensorsHeader, RefusesHolesOverlapsAndMissingData) {
  const auto two = [](const std::string& second, int64_t size) {
    return parsing(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                   R"("b":{"dtype":"U8","shape":[2],"data_offsets":)" +
                       second + "}}",
                   size);
  };
  EXPECT_THAT(two("[3,5]", 5), is_corrupt("'b' begin at 3, but the tensor before it ends at 2"));
  EXPECT_THAT(two("[1,3]", 3), is_corrupt("'b' begin at 1, but the tensor before it ends at 2"));
  EXPECT_THAT(two("[2,4]", 3), is_corrupt("data_offsets end at 4, but 3 bytes follow"));
  EXPECT_THAT(two("[2,4]", 5), is_corrupt("data_offsets end at 4, but 5 bytes follow"));
  EXPECT_THAT(parsing(entry_of("\"U8\"", "[2]", "[1,3]"), 3), is_corrupt("begin at 1"));
  EXPECT_THAT(parsing("{}", 1), is_corrupt("1 bytes follow"));
  EXPECT_NO_THROW(two("[2,4]", 4)());
}

TEST(SafetensorsHeader, RefusesToWriteTextThatIsNotUtf8) {
  EXPECT_THAT([] { format_safetensors_header({.metadata = {{"k", "\xff"}}, .tensors = {}}, kFile); },
              ThrowsMessage<ConfigError>(HasSubstr("not UTF-8")));
}

}  // namespace
}  // namespace snug::detail::safetensors_header_test
