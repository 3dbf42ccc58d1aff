#include "src/distributed/shard_layout.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

namespace snug::detail::shard_layout_test {
namespace {

using Pieces = std::vector<ShardPiece>;

int64_t bytes_of_rank(const Pieces& pieces, const std::vector<ShardItem>& items, int rank) {
  int64_t bytes = 0;
  for (const ShardPiece& piece : pieces) {
    bytes += piece.rank == rank ? (piece.end - piece.begin) * items[piece.parameter].bytes_each : 0;
  }
  return bytes;
}

TEST(ShardLayout, CutsParametersAtMultiples) {
  EXPECT_EQ(shard_layout({{100, 4}, {156, 4}}, 2, 64), (Pieces{{0, 0, 0, 100}, {1, 1, 0, 156}}));
  EXPECT_EQ(shard_layout({{1000, 4}}, 2, 64), (Pieces{{0, 0, 0, 512}, {0, 1, 512, 1000}}));
  EXPECT_EQ(shard_layout({{128, 8}, {128, 4}}, 3, 64), (Pieces{{0, 0, 0, 64}, {0, 1, 64, 128}, {1, 2, 0, 128}}));
}

TEST(ShardLayout, TakesEveryElementOnceAndGivesEachRankAsManyBytes) {
  std::vector<ShardItem> items;
  for (int64_t i = 0; i < 40; ++i) {
    items.push_back({(i * 7919) % 5000, i % 3 == 0 ? 8 : 4});
  }
  for (const int ranks : {1, 2, 3, 4, 7, 64}) {
    const Pieces pieces = shard_layout(items, ranks, 64);
    std::vector<int64_t> reached(items.size());
    int rank = 0;
    for (const ShardPiece& piece : pieces) {
      EXPECT_EQ(piece.begin, reached[piece.parameter]);
      EXPECT_TRUE(piece.begin % 64 == 0 && piece.rank >= rank);
      reached[piece.parameter] = piece.end;
      rank = piece.rank;
    }
    int64_t total = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      EXPECT_EQ(reached[i], items[i].elements);
      total += items[i].elements * items[i].bytes_each;
    }
    for (int r = 0; r < ranks; ++r) {
      EXPECT_NEAR(static_cast<double>(bytes_of_rank(pieces, items, r)), static_cast<double>(total) / ranks, 64 * 8);
    }
  }
}

TEST(ShardLayout, KeepsParametersWholeWhereTheyMustBe) {
  const std::vector<ShardItem> items = {{10, 4}, {90, 4}, {50, 4}, {0, 4}, {45, 4}};
  EXPECT_EQ(shard_layout(items, 2, 0), (Pieces{{0, 0, 0, 10}, {1, 0, 0, 90}, {2, 1, 0, 50}, {4, 1, 0, 45}}));
}

TEST(ShardLayout, LeavesRanksEmptyWhereThereIsTooLittle) {
  EXPECT_EQ(shard_layout({{3, 4}}, 4, 64), (Pieces{{0, 3, 0, 3}}));
}

}  // namespace
}  // namespace snug::detail::shard_layout_test
