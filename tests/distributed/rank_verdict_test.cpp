#include "src/distributed/rank_verdict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::detail::rank_verdict_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Failed {
  RankFailure failure = RankFailure::None;
  int64_t smallest = 0;
};

Verdict verdict_of(const std::vector<Failed>& ranks) {
  std::vector<RankWord> words;
  for (const Failed& rank : ranks) {
    words.push_back({.failure = static_cast<int64_t>(rank.failure), .smallest = rank.smallest});
  }
  return judge(words);
}

TEST(RankVerdict, IsNoneIfNobodyHasFailed) {
  const Verdict verdict = verdict_of({{}, {}});
  EXPECT_EQ(verdict.cause, RankFailure::None);
  EXPECT_FALSE(verdict.is_repeated());
  EXPECT_NO_THROW(raise(verdict, Talk::Items));
}

TEST(RankVerdict, NamesTheGravestCauseAndAllThatHaveFailed) {
  using enum RankFailure;
  EXPECT_EQ(verdict_of({{LeftBehind}, {OutOfMemory}, {TakesLess}, {Other}}).cause, LeftBehind);
  EXPECT_EQ(verdict_of({{Other}, {TakesLess}, {OutOfMemory}}).cause, OutOfMemory);
  EXPECT_EQ(verdict_of({{TakesLess}, {Other}}).cause, TakesLess);
  EXPECT_THAT(verdict_of({{}, {Other}, {}, {TakesLess}}).ranks, ElementsAre(1, 3));
}

TEST(RankVerdict, RepeatsTheStepOnlyIfAllThatFailedTakeLess) {
  using enum RankFailure;
  EXPECT_TRUE(verdict_of({{}, {TakesLess}}).is_repeated());
  EXPECT_TRUE(verdict_of({{TakesLess}, {TakesLess}}).is_repeated());
  for (const RankFailure other : {Other, OutOfMemory, LeftBehind}) {
    EXPECT_FALSE(verdict_of({{TakesLess}, {other}}).is_repeated());
    EXPECT_FALSE(verdict_of({{other}, {TakesLess}}).is_repeated());
  }
}

TEST(RankVerdict, KnowsASmallestBudgetIfEachThatFailedDoes) {
  using enum RankFailure;
  EXPECT_EQ(verdict_of({{OutOfMemory, 300}, {}, {OutOfMemory, 500}}).smallest.count(), 500);
  EXPECT_EQ(verdict_of({{OutOfMemory, 300}, {OutOfMemory, 0}}).smallest.count(), 0);
}

TEST(RankVerdict, HasAllRanksShardTheirWeightsIfOneHasNoPlan) {
  const RankSplit planned{.at_most = 4, .batch = 8, .is_planned = 1}, none{.batch = 8, .has_no_plan = 1};
  EXPECT_TRUE(agree({planned, planned}).is_settled);
  EXPECT_FALSE(agree({planned, planned}).shards_weights);
  EXPECT_TRUE(agree({planned, none}).shards_weights);
  EXPECT_FALSE(agree({planned, none}).is_settled);
  EXPECT_FALSE(agree({none, none}).is_settled);
}

TEST(RankVerdict, BecomesAnErrorThatNamesTheRanks) {
  using enum RankFailure;
  const auto raises = [](const std::vector<Failed>& ranks, Talk talk) {
    return [=] { raise(verdict_of(ranks), talk); };
  };
  EXPECT_THAT(raises({{}, {Other}}, Talk::Sums),
              ThrowsMessage<DistributedError>(HasSubstr("rank 1 failed in this step")));
  EXPECT_THAT(raises({{Other}, {Other}}, Talk::Sums), ThrowsMessage<DistributedError>(HasSubstr("ranks 0, 1 failed")));
  EXPECT_THAT(raises({{LeftBehind}, {}}, Talk::Items),
              ThrowsMessage<DistributedError>(HasSubstr("go on from a snapshot")));
  EXPECT_THAT(raises({{}, {TakesLess}, {Other}}, Talk::Sums),
              ThrowsMessage<BudgetExceeded>(HasSubstr("ran out of memory")));
  EXPECT_THAT(raises({{OutOfMemory, 4096}}, Talk::Split),
              ThrowsMessage<BudgetExceeded>(HasSubstr("(4096 bytes) would do")));
  EXPECT_THAT(raises({{OutOfMemory}, {TakesLess}}, Talk::Split),
              ThrowsMessage<BudgetExceeded>(HasSubstr("ran out of memory")));
}

}  // namespace
}  // namespace snug::detail::rank_verdict_test
