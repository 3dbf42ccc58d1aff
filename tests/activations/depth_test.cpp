#include <map>

#include <gtest/gtest.h>

#include "tests/support/depth_techniques.h"

namespace snug::testing::depth_test {
namespace {

constexpr int64_t kDepth = 24;

/// A chain of 24 GPT blocks, run in every way, and twice as deep.
class Depth : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    for (const Technique& technique : techniques()) {
      costs_[technique.name] = measure(technique, kDepth);
      deeper_[technique.name] = measure(technique, 2 * kDepth);
    }
  }
  static void TearDownTestSuite() {
    costs_.clear();
    deeper_.clear();
  }
  static int64_t growth(const std::string& name) { return deeper_[name].peak_bytes - costs_[name].peak_bytes; }

  static inline std::map<std::string, DepthCost> costs_, deeper_;
};

TEST_F(Depth, ChangesNoGradient) {
  for (const Technique& technique : techniques()) {
    if (technique.name != "reversible") {  // another model: two streams
      EXPECT_TRUE(same_bits(costs_[technique.name].gradients, costs_["plain"].gradients)) << technique.name;
    }
  }
}

TEST_F(Depth, CallsEachBlockOnce) {
  for (const Technique& technique : techniques()) {
    EXPECT_EQ(costs_[technique.name].calls, kDepth) << technique.name;
  }
}

TEST_F(Depth, CostsMemoryAsTheTechniqueSays) {
  const int64_t activation = DepthShape().activation_bytes();
  const int64_t block = growth("plain") / kDepth;  // what one more block saves
  EXPECT_GE(block, 10 * activation);
  EXPECT_GE(costs_["plain"].peak_bytes, kDepth * block);
  // O(sqrt n): 5 segments of about 5 blocks.
  EXPECT_LT(costs_["sqrt(n) segments"].peak_bytes, 10 * block);
  EXPECT_LT(growth("sqrt(n) segments"), kDepth * block / 4);
  // Its input for each block, and no more.
  EXPECT_EQ(growth("every block"), kDepth * activation);
  // O(log n): twice the depth is one more level.
  EXPECT_LT(growth("nested"), 4 * activation);
  EXPECT_LT(costs_["nested"].peak_bytes, costs_["every block"].peak_bytes);
  // O(1).
  EXPECT_EQ(growth("reversible"), 0);
}

TEST_F(Depth, CostsFileSpaceInsteadOfMemoryWhenActivationsAreOffloaded) {
  const int64_t activation = DepthShape().activation_bytes();
  // Tensors that are smaller than half an activation stay: means and deviations of norms, attention's log-sums.
  const int64_t small = growth("offload") / kDepth;
  EXPECT_LT(small, activation);
  EXPECT_LT(costs_["offload"].peak_bytes, costs_["plain"].peak_bytes / 4);
  EXPECT_EQ(growth("every block, offload"), 0) << "the inputs are gone as well";
}

}  // namespace
}  // namespace snug::testing::depth_test
