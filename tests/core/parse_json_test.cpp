#include "src/core/parse_json.h"

#include <limits>
#include <string>

#include <gtest/gtest.h>

namespace snug::detail::parse_json_test {
namespace {

using Json = nlohmann::ordered_json;

std::string nested(size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); }

TEST(ParseJson, LeavesOutWhatIsNestedTooDeeplyToBeWrittenAgain) {
  const Json json = parse_json<Json>(R"({"before":1,"deep":)" + nested(1'000'000) + R"(,"after":"text"})");
  EXPECT_EQ(json.at("before"), 1);
  EXPECT_EQ(json.at("after"), "text");
  EXPECT_LT(json.at("deep").dump().size(), 1000u);
}

TEST(ParseJson, ReadsTheRestAsItIs) {
  for (const std::string text : {R"({"a":[1,2.5,null,true,{"b":[]}],"c":"text"})", "7", "[[[]]]"}) {
    EXPECT_EQ(parse_json<Json>(text), Json::parse(text));
  }
  EXPECT_THROW(parse_json<Json>("{"), Json::exception);
  EXPECT_TRUE(parse_json<Json>("{", /*allow_exceptions=*/false).is_discarded());
}

TEST(WholeNumber, IsTheNearestThatTheTypeHas) {
  const auto read = [](const char* text) { return whole_number<int>(nlohmann::json::parse(text)); };
  EXPECT_EQ(read("-7"), -7);
  EXPECT_EQ(read("4294967297"), std::numeric_limits<int>::max());
  EXPECT_EQ(read("18446744073709551615"), std::numeric_limits<int>::max());
  EXPECT_EQ(read("-4294967297"), std::numeric_limits<int>::min());
  EXPECT_EQ(whole_number<int64_t>(nlohmann::json::parse("9223372036854775807")), std::numeric_limits<int64_t>::max());
}

TEST(WholeNumber, IsNoFractionAndNoText) {
  for (const char* text : {"1.0", "1e300", "\"1\"", "null", "true", "[1]"}) {
    EXPECT_THROW(whole_number<int>(nlohmann::json::parse(text)), nlohmann::json::type_error) << text;
  }
}

}  // namespace
}  // namespace snug::detail::parse_json_test
