// BlockCache: blocks come back to requests of their own size, and go when there is no room for them.

#include "src/memory/block_cache.h"

#include <array>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace snug::detail::block_cache_test {
namespace {

using ::testing::ElementsAre;

std::vector<void*> given_back;

class BlockCacheTest : public ::testing::Test {
 protected:
  BlockCacheTest() { given_back.clear(); }

  BlockCache cache_{[](void* block) { given_back.push_back(block); }};
  std::array<char, 4> memory_{};
  void* const a_ = &memory_[0];
  void* const b_ = &memory_[1];
  void* const c_ = &memory_[2];
};

TEST_F(BlockCacheTest, GivesABlockToTheNextRequestOfItsSizeAndNoOther) {
  cache_.put(a_, 100);
  EXPECT_EQ(cache_.take(99), nullptr);
  EXPECT_EQ(cache_.take(101), nullptr);
  EXPECT_EQ(cache_.take(100), a_);
  EXPECT_EQ(cache_.take(100), nullptr);
  EXPECT_EQ(cache_.bytes(), 0);
}

TEST_F(BlockCacheTest, GivesTheBlockThatCameLastFirst) {
  cache_.put(a_, 100);
  cache_.put(b_, 100);
  EXPECT_EQ(cache_.take(100), b_);
  EXPECT_EQ(cache_.take(100), a_);
}

TEST_F(BlockCacheTest, GivesBackThoseThatCameFirstUntilTheRestFits) {
  cache_.put(a_, 100);
  cache_.put(b_, 30);
  cache_.put(c_, 100);
  EXPECT_EQ(cache_.bytes(), 230);
  cache_.shrink(130);
  EXPECT_THAT(given_back, ElementsAre(a_));
  cache_.shrink(129);
  EXPECT_THAT(given_back, ElementsAre(a_, b_));
  EXPECT_EQ(cache_.bytes(), 100);
  EXPECT_EQ(cache_.take(100), c_);
}

TEST_F(BlockCacheTest, FindsABlockAfterOthersOfItsSizeHaveGone) {
  cache_.put(a_, 100);
  cache_.shrink(0);
  cache_.put(b_, 100);
  EXPECT_EQ(cache_.take(100), b_);
  EXPECT_THAT(given_back, ElementsAre(a_));
}

}  // namespace
}  // namespace snug::detail::block_cache_test
