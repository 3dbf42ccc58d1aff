// The plans that a search remembers, against all plans that the search has simulated.

#include "src/planner/pool.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/planner/sample_profiles.h"

namespace snug::plan::pool_test {
namespace {

using testing::deep_chain;
using testing::random_profile;

constexpr int64_t kAnyBudget = int64_t{1} << 40;

Stays random_plan(const Profile& profile, std::mt19937& random) {
  Stays plan = keep_all(profile);
  for (Stay& stay : plan) {
    switch (random() % 4) {
      case 0:
        stay = Stay::never();
        break;
      case 1:
        stay = Stay::once_rebuilt();
        break;
      default:
        break;
    }
  }
  return plan;
}

TEST(Pool, RemembersThePlansThatNoOtherPlanBeatsAndAnswersEachBudgetWithTheFastestThatFits) {
  int impossible = 0, forgotten = 0;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    const Simulator simulator(random_profile(seed, 20));
    Pool pool(simulator);
    EXPECT_TRUE(pool.within(kAnyBudget) == pool.known().end());
    std::mt19937 random(seed);
    std::vector<std::pair<int64_t, double>> all;  // peaks and seconds
    for (int i = 0; i < 200; ++i) {
      const Profile& profile = simulator.profile();
      const Point point = pool.evaluate(i == 0 ? keep_all(profile) : random_plan(profile, random), kAnyBudget);
      if (point.possible()) {
        all.emplace_back(point.run.peak_bytes, point.run.seconds);
      } else {
        ++impossible;
      }
    }
    for (const auto& [peak, known] : pool.known()) {
      const Simulation run = simulator.run(known.second);
      ASSERT_EQ(run.peak_bytes, peak);
      ASSERT_EQ(run.seconds, known.first);
    }
    int64_t least = all[0].first;
    for (const auto& [budget, ignored] : all) {
      least = std::min(least, budget);
      double fastest = ignored;
      for (const auto& [peak, seconds] : all) {
        fastest = peak <= budget ? std::min(fastest, seconds) : fastest;
      }
      const auto found = pool.within(budget);
      ASSERT_TRUE(found != pool.known().end());
      ASSERT_LE(found->first, budget);
      ASSERT_EQ(found->second.first, fastest);
    }
    EXPECT_EQ(pool.known().begin()->first, least);
    EXPECT_TRUE(pool.within(least - 1) == pool.known().end());
    double before = pool.known().begin()->second.first + 1;
    for (const auto& [peak, known] : pool.known()) {
      ASSERT_LT(known.first, before) << "more bytes for no less time";
      before = known.first;
    }
    forgotten += static_cast<int>(all.size() - pool.known().size());
  }
  EXPECT_GT(impossible, 0);
  EXPECT_GT(forgotten, 0);
}

TEST(Pool, DoesNotRememberAPlanWhoseSimulationWasCutShort) {
  const Simulator simulator(deep_chain(200));
  Pool pool(simulator);
  const Point nothing = pool.evaluate(Stays(simulator.profile().storages.size(), Stay::never()), kAnyBudget);
  EXPECT_TRUE(nothing.run.is_cut_short);
  EXPECT_FALSE(nothing.possible() || nothing.fits());
  EXPECT_TRUE(pool.known().empty());
  EXPECT_TRUE(pool.evaluate(keep_all(simulator.profile()), kAnyBudget).fits());
  EXPECT_EQ(pool.known().size(), 1u);
}

TEST(Pool, CountsTheBytesAboveTheBudgetOverAllEvents) {
  const Simulator simulator(deep_chain(8));
  const Stays all = keep_all(simulator.profile());
  const Simulation run = simulator.run(all);
  Pool pool(simulator);
  EXPECT_TRUE(pool.evaluate(all, run.peak_bytes).fits());
  const Point above = pool.evaluate(all, run.peak_bytes - 1);
  EXPECT_FALSE(above.fits());
  EXPECT_EQ(above.overflow, static_cast<double>(std::count(run.high.begin(), run.high.end(), run.peak_bytes)));
}

TEST(Pool, TakesEachSimulationFromTheWorkLeft) {
  const Simulator simulator(deep_chain(8));
  const int64_t events = std::ssize(simulator.profile().events);
  Pool pool(simulator);
  pool.set_work(10'000);
  pool.evaluate(keep_all(simulator.profile()), kAnyBudget);
  EXPECT_EQ(pool.work_left(), 10'000 - events);
  const Point again = pool.evaluate(Stays(simulator.profile().storages.size(), Stay::never()), kAnyBudget);
  ASSERT_GT(again.run.replayed, 0);
  EXPECT_EQ(pool.work_left(), 10'000 - 2 * events - 2 * again.run.replayed);
  EXPECT_EQ(pool.simulations(), 2);
  const int64_t steps = pool.steps();
  pool.add_steps(5);
  EXPECT_EQ(pool.steps(), steps + 5);
}

}  // namespace
}  // namespace snug::plan::pool_test
