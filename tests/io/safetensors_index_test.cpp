#include "src/io/safetensors_index.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::detail::safetensors_index_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr const char* kFile = "model.safetensors.index.json";

auto parsing(const std::string& json) {
  return [=] { parse_safetensors_index(json, kFile); };
}

auto is_corrupt(const std::string& what) {
  return ThrowsMessage<CorruptFile>(AllOf(HasSubstr(kFile), HasSubstr(what), HasSubstr("damaged")));
}

std::string map_of_one(const std::string& shard) { return R"({"weight_map":{"w":)" + shard + "}}"; }

TEST(SafetensorsIndex, ReadsShardsAndMetadata) {
  const auto index = parse_safetensors_index(R"({"metadata": {"total_size": 24, "note": "two"},
       "weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}, "other": [1]})",
                                             kFile);
  EXPECT_EQ(index.shards,
            (std::map<std::string, std::set<std::string>>{{"1.safetensors", {"a", "c"}}, {"2.safetensors", {"b"}}}));
  EXPECT_EQ(index.metadata, (std::map<std::string, std::string>{{"total_size", "24"}, {"note", "two"}}));
  EXPECT_TRUE(parse_safetensors_index(R"({"weight_map":{}})", kFile).shards.empty());
}

TEST(SafetensorsIndex, RefusesAllButAnObjectWithAWeightMap) {
  for (const char* json : {"[]", "3", "null", "\"weight_map\"", "{}", R"({"metadata":{}})"}) {
    EXPECT_THAT(parsing(json), is_corrupt("not a JSON object with a weight_map")) << json;
  }
  for (const char* json : {"", "{", R"({"weight_map":{}}x)", "\xff"}) {
    EXPECT_THAT(parsing(json), is_corrupt("the index is not JSON")) << json;
  }
  EXPECT_THAT(parsing(std::string(R"({"weight_map":{}})") + '\0'), is_corrupt("zero byte"));
  EXPECT_THAT(parsing(R"({"weight_map":["a"]})"), is_corrupt("weight_map is not an object"));
  EXPECT_THAT(parsing(R"({"weight_map":{},"metadata":1})"), is_corrupt("metadata is not an object"));
}

TEST(SafetensorsIndex, RefusesWhatIsNestedWithoutEnd) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_NO_THROW(parsing(R"({"weight_map":{},"metadata":{"a":)" + nested(1) + "}}")());
  EXPECT_THAT(parsing(R"({"weight_map":{},"metadata":{"a":)" + nested(3) + "}}"), is_corrupt("nested deeper"));
  EXPECT_THAT(parsing(nested(1'000'000)), is_corrupt("nested deeper"));
}

TEST(SafetensorsIndex, RefusesANameThatIsThereTwice) {
  EXPECT_THAT(parsing(R"({"weight_map":{"w":"a","w":"b"}})"), is_corrupt("'w' is in the index twice"));
  EXPECT_THAT(parsing(R"({"weight_map":{},"weight_map":{"w":"b"}})"), is_corrupt("'weight_map' is in the index twice"));
}

TEST(SafetensorsIndex, RefusesShardsThatAreNoFilesBesideIt) {
  for (const char* shard : {R"("../a")", R"("..")", R"(".")", R"("")", R"("/etc/passwd")", R"("a/b")", R"("a\\b")",
                            R"("..\\a")", R"("a\u0000b")"}) {
    EXPECT_THAT(parsing(map_of_one(shard)), is_corrupt("no name of a file in the index's folder")) << shard;
  }
  for (const char* shard : {"1", "null", R"(["a"])"}) {
    EXPECT_THAT(parsing(map_of_one(shard)), is_corrupt("not a file's name")) << shard;
  }
  EXPECT_NO_THROW(parsing(map_of_one(R"("..a..b")"))());
}

TEST(SafetensorsIndex, RefusesShardsWithOtherTensors) {
  const auto index = parse_safetensors_index(R"({"weight_map":{"a":"1","b":"2","c":"1"}})", kFile);
  const auto checking = [&](std::vector<std::string> names) {
    SafetensorsHeader header;
    for (const std::string& name : names) {
      header.tensors.push_back({.name = name, .dtype = "U8", .shape = {0}});
    }
    return [=] { check_shard(index, "1", header, kFile); };
  };
  const auto refused = [](const std::string& what) {
    return ThrowsMessage<CorruptFile>(AllOf(HasSubstr(kFile), HasSubstr(what), HasSubstr("of one model")));
  };
  EXPECT_NO_THROW(checking({"c", "a"})());
  EXPECT_THAT(checking({"a"}), refused("tensor 'c' is not in its shard 1"));
  EXPECT_THAT(checking({"a", "c", "d"}), refused("shard 1 has a tensor 'd', which the index does not name there"));
  EXPECT_THAT(checking({"a", "b"}), refused("shard 1 has a tensor 'b'"));  // it is in the other shard
}

}  // namespace
}  // namespace snug::detail::safetensors_index_test
