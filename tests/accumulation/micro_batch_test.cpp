#include <gtest/gtest.h>

#include "snug/accumulation.h"
#include "snug/core.h"

namespace snug::micro_batch_test {
namespace {

TEST(MicroBatches, AreViewsOfAllItemsWithASmallerLastOne) {
  const Batch batch{torch::arange(10), torch::arange(20).reshape({10, 2})};
  const auto parts = micro_batches(batch, 4);
  ASSERT_EQ(parts.size(), 3U);
  EXPECT_EQ(parts[0].size(), 4);
  EXPECT_EQ(parts[2].size(), 2);
  EXPECT_TRUE(parts[2][1].equal(batch[1].slice(0, 8, 10)));
  EXPECT_EQ(parts[1][0].storage().data(), batch[0].storage().data());
}

TEST(MicroBatches, RefuseASizeBelowOne) { EXPECT_THROW(micro_batches(Batch{torch::ones({2})}, 0), ConfigError); }

TEST(BatchTest, RefusesTensorsWithoutACommonSize) {
  EXPECT_THROW((Batch{torch::ones({2}), torch::ones({3})}), ConfigError);
  EXPECT_THROW((Batch{torch::ones({})}), ConfigError);
  EXPECT_THROW((Batch{torch::Tensor()}), ConfigError);
  EXPECT_THROW(Batch(std::vector<torch::Tensor>{}), ConfigError);
}

TEST(BatchTest, OnItsOwnDeviceIsNotCopied) {
  const Batch batch{torch::ones({2})};
  EXPECT_EQ(batch.to(torch::kCPU)[0].data_ptr(), batch[0].data_ptr());
}

}  // namespace
}  // namespace snug::micro_batch_test
