// The curve of plans over budgets, and the search for a micro-batch.

#include "src/planner/search.h"

#include <list>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "src/planner/curve.h"
#include "tests/planner/sample_profiles.h"

namespace snug::plan::search_test {
namespace {

using testing::gpt_profile;
using ::testing::HasSubstr;
using testing::random_profile;

constexpr SolverOptions kQuick{.work = 200'000};

// The same work on `items` of 8: bytes and seconds in proportion, but for 5 % of the time, and for gradients.
Profile part_of(Profile profile, int64_t items) {
  const auto scale = [&](int64_t bytes) { return bytes * items / 8; };
  for (Storage& storage : profile.storages) {
    storage.bytes = scale(storage.bytes);
  }
  for (Event& event : profile.events) {
    event.bytes = scale(event.bytes);
  }
  for (Operator& op : profile.operators) {
    op.seconds *= 0.05 + 0.95 * static_cast<double>(items) / 8;
    op.workspace = scale(op.workspace);
  }
  for (BackwardStep& step : profile.backward) {
    step.seconds *= 0.05 + 0.95 * static_cast<double>(items) / 8;
  }
  return profile;
}

struct Splits {
  Simulator whole{part_of(gpt_profile(4), 8)}, half{part_of(gpt_profile(4), 4)}, third{part_of(gpt_profile(4), 3)};

  std::vector<Candidate> all() const { return {{3, &third}, {8, &whole}, {4, &half}}; }
  int64_t plain() const { return whole.run(keep_all(whole.profile())).peak_bytes; }
};

TEST(Curve, GoesFromPlainTrainingToTheSmallestThatIsFeasibleAndNeverGetsFasterOnTheWay) {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    const Simulator simulator(random_profile(seed, 20));
    const Curve curve = plan::curve(simulator, {.points = 8, .solver = kQuick});
    const Simulation plain = simulator.run(keep_all(simulator.profile()));
    ASSERT_LE(curve.points.front().peak_bytes, plain.peak_bytes);
    ASSERT_EQ(curve.points.front().seconds, plain.seconds);
    for (size_t i = 0; i < curve.points.size(); ++i) {
      const Simulation run = simulator.run(curve.points[i].stays);
      ASSERT_EQ(run.peak_bytes, curve.points[i].peak_bytes);
      if (i > 0) {
        ASSERT_LT(curve.points[i].peak_bytes, curve.points[i - 1].peak_bytes);
        ASSERT_GE(curve.points[i].seconds, curve.points[i - 1].seconds);
      }
    }
    EXPECT_EQ(curve.within(curve.smallest_feasible_bytes()), &curve.points.back());
    EXPECT_EQ(curve.within(curve.smallest_feasible_bytes() - 1), nullptr);
    EXPECT_EQ(curve.within(plain.peak_bytes), &curve.points.front());
  }
}

TEST(Curve, IsReadByPeopleToo) {
  const Curve curve = plan::curve(Simulator(gpt_profile(2)), {.points = 4, .solver = kQuick});
  EXPECT_THAT(curve.table(), ::testing::AllOf(HasSubstr("100.0 %"), HasSubstr("+0.0 %"), HasSubstr("MiB")));
  EXPECT_THROW(plan::curve(Simulator(gpt_profile(2)), {.points = 1}), ConfigError);
}

TEST(Search, TakesTheWholeBatchWhereItFitsAndRebuildsNothing) {
  const Splits splits;
  const Search found = search(splits.all(), {.batch = 8, .budget = 1'000 + splits.plain(), .fixed_bytes = 1'000});
  ASSERT_TRUE(found.choice);
  EXPECT_EQ(found.choice->items, 8);
  EXPECT_EQ(found.choice->micro_batches, 1);
  EXPECT_EQ(found.choice->seconds, found.choice->plan.plain_seconds);
  EXPECT_THAT(found.explain(), ::testing::AllOf(HasSubstr("chosen"), HasSubstr("slower, whatever it keeps")));
}

TEST(Search, SplitsOrRebuildsWhicheverIsFasterAndStaysBelowTheBudget) {
  const Splits splits;
  int split = 0;
  for (int share = 100; share >= 40; share -= 5) {
    const SearchOptions options{
        .batch = 8, .budget = splits.plain() * share / 100, .optimizer_seconds = 1e-3, .solver = kQuick};
    const Search found = search(splits.all(), options);
    ASSERT_TRUE(found.choice) << share << " %";
    EXPECT_LE(found.choice->peak_bytes, options.budget);
    split += found.choice->items < 8 ? 1 : 0;
    for (const Candidate& candidate : splits.all()) {
      const Search alone = search({candidate}, options);
      EXPECT_TRUE(!alone.choice || kApart * alone.choice->seconds >= found.choice->seconds) << share << " %";
    }
  }
  EXPECT_GT(split, 0);
  EXPECT_LT(split, 13);
}

TEST(Search, IsNeverSlowerThanTwoHalvesWithEverythingKeptInTheirBytes) {
  const Splits splits;
  const int64_t gradients = splits.plain() / 20;
  const Simulation half = splits.half.run(keep_all(splits.half.profile()));
  for (const int64_t more : {0, 1'000}) {
    const Search found = search(splits.all(), {.batch = 8,
                                               .budget = 1'000 + gradients + half.peak_bytes + more,
                                               .fixed_bytes = 1'000,
                                               .gradient_bytes = gradients,
                                               .solver = kQuick});
    ASSERT_TRUE(found.choice);
    EXPECT_LE(found.choice->seconds, kApart * 2 * half.seconds);
  }
}

// Micro-batches of 4 would take `ratio` of the time of the whole batch, whose plan rebuilds nothing.
Search whole_against_half(double ratio) {
  Profile half = part_of(gpt_profile(4), 4);
  const Simulator whole(part_of(gpt_profile(4), 8));
  const double longer = ratio * whole.profile().plain_seconds() / (2 * half.plain_seconds());
  for (Operator& op : half.operators) {
    op.seconds *= longer;
  }
  for (BackwardStep& step : half.backward) {
    step.seconds *= longer;
  }
  const Simulator halved(std::move(half));
  return search({{4, &halved}, {8, &whole}}, {.batch = 8, .budget = whole.run(keep_all(whole.profile())).peak_bytes});
}

TEST(Search, TakesFewerMicroBatchesWhereTimesDoNotTellThemApart) {
  EXPECT_EQ(whole_against_half(0.97).choice->items, 8);
  EXPECT_THAT(whole_against_half(0.97).explain(), HasSubstr("not sure: another micro-batch takes 0.97 of the time"));
  EXPECT_EQ(whole_against_half(0.90).choice->items, 4);
  EXPECT_THAT(whole_against_half(0.90).explain(), HasSubstr("likely: other micro-batches take at least 1.11 times"));
  EXPECT_EQ(whole_against_half(1.2).choice->items, 8);
  EXPECT_THAT(whole_against_half(1.2).explain(), HasSubstr("The choice is likely: other micro-batches take at least"));
  EXPECT_THAT(whole_against_half(1.3).explain(), HasSubstr("The choice is sure"));
}

TEST(Search, IsAsGoodWithSolversThatHaveAnsweredOtherBudgets) {
  const Splits splits;
  for (const bool rises : {false, true}) {
    std::list<Solver> solvers;
    for (const Candidate& candidate : splits.all()) {
      solvers.emplace_back(*candidate.simulator, kQuick);
    }
    for (const int64_t eighths : rises ? std::vector<int64_t>{3, 5, 7, 8} : std::vector<int64_t>{8, 7, 5, 3}) {
      const SearchOptions options{.batch = 8, .budget = splits.plain() * eighths / 8, .solver = kQuick};
      std::vector<Candidate> remembering = splits.all();
      for (auto [i, solver] = std::pair(size_t{0}, solvers.begin()); i < remembering.size(); ++i, ++solver) {
        remembering[i].solver = &*solver;
      }
      const Search fresh = search(splits.all(), options), again = search(remembering, options);
      ASSERT_TRUE(fresh.choice && again.choice);
      EXPECT_LE(again.choice->seconds, fresh.choice->seconds);
      EXPECT_LE(again.choice->peak_bytes, options.budget);
    }
  }
}

TEST(Search, SaysThatBoundsLeaveACandidateOut) {
  const Splits splits;
  const Search found = search({{8, &splits.whole}, {4, &splits.half, /*own_bytes=*/splits.plain()}},
                              {.batch = 8, .budget = splits.plain() * 9 / 10, .solver = kQuick});
  ASSERT_TRUE(found.choice);
  EXPECT_EQ(found.choice->items, 8);
  EXPECT_THAT(found.explain(), HasSubstr("does not fit, whatever it keeps"));
}

TEST(Search, CountsGradientsFromTheSecondMicroBatchOnAndForTheOptimizer) {
  const Splits splits;
  const int64_t half = splits.half.run(keep_all(splits.half.profile())).peak_bytes;
  const auto only_half = [&](int64_t budget, int64_t gradients, int64_t optimizer) {
    return search(
        {{4, &splits.half}},
        {.batch = 8, .budget = budget, .gradient_bytes = gradients, .optimizer_bytes = optimizer, .solver = kQuick});
  };
  EXPECT_EQ(only_half(half, 0, 0).choice->plan.seconds, splits.half.profile().plain_seconds());
  EXPECT_GT(only_half(half, half / 4, 0).choice->plan.seconds, splits.half.profile().plain_seconds());
  EXPECT_EQ(only_half(half, half / 4, 0).choice->micro_batches, 2);
  const Search refused = only_half(half, half / 4, half);
  EXPECT_FALSE(refused.choice);
  EXPECT_EQ(refused.smallest_feasible_bytes, half + half / 4);
}

TEST(Search, SaysWhatWouldDoAndWhatIsAliveThereWhereNothingFits) {
  const Splits splits;
  SearchOptions options{.batch = 8, .budget = 4'000, .fixed_bytes = 5'000, .gradient_bytes = 100, .solver = kQuick};
  const Search refused = search(splits.all(), options);
  ASSERT_FALSE(refused.choice);
  EXPECT_THAT(refused.least_is, HasSubstr("at the peak of the smallest plan are alive 4.98 KiB of weights"));
  options.budget = refused.smallest_feasible_bytes;
  EXPECT_TRUE(search(splits.all(), options).choice);
}

TEST(Search, SaysWhatWouldDoAndThatDoesWhenTheStepIsMeasuredAgain) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const Profile profile = random_profile(seed, 40);
    const Simulator simulator(profile), another(testing::measured_again(profile, seed));
    SearchOptions options{.batch = 8, .budget = 1'000, .fixed_bytes = 500, .solver = {.work = 100'000}};
    options.budget = search({{8, &simulator}}, options).smallest_feasible_bytes;
    EXPECT_TRUE(search({{8, &another}}, options).choice) << seed;
  }
}

TEST(Choice, IsPlainDataThatIsReadBack) {
  const Splits splits;
  const auto choice = search(splits.all(), {.batch = 8, .budget = splits.plain() / 2, .solver = kQuick}).choice;
  ASSERT_TRUE(choice);
  EXPECT_EQ(Choice::from_json(choice->to_json()), *choice);
  EXPECT_THROW(Choice::from_json("{}"), ConfigError);
}

}  // namespace
}  // namespace snug::plan::search_test
