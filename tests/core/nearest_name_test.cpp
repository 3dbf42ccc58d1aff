#include "src/core/nearest_name.h"

#include <gtest/gtest.h>

namespace snug::nearest_name_test {
namespace {

TEST(NearestName, FindsAMistypedNameAmongKnownOnes) {
  const std::vector<std::string> known{"--batch", "--micro-batch", "--memory"};
  EXPECT_EQ(nearest_name("--bach", known), "--batch");
  EXPECT_EQ(nearest_name("--memmory", known), "--memory");
  EXPECT_EQ(nearest_name("--microbatch", known), "--micro-batch");
}

TEST(NearestName, PrefersTheFirstOfSeveralAndCopesWithNone) {
  EXPECT_EQ(nearest_name("c", {"a", "b"}), "a");
  EXPECT_EQ(nearest_name("anything", {}), "");
  EXPECT_EQ(nearest_name("", {"abc", "x"}), "x");
}

}  // namespace
}  // namespace snug::nearest_name_test
