// Plans that cut a step into segments, against the recurrence for a chain, and on graphs that no chain describes.

#include "src/planner/segments.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <variant>

#include <gtest/gtest.h>

#include "src/planner/room.h"
#include "src/planner/segment_table.h"
#include "src/planner/solver.h"
#include "src/planner/storage_uses.h"
#include "tests/planner/sample_profiles.h"

namespace snug::plan::segments_test {
namespace {

using testing::deep_chain;
using testing::ProfileBuilder;
using testing::random_profile;

Segments cut(const Simulator& simulator, int most) {
  return cut_into_segments(simulator, StorageUses(simulator), most);
}

std::vector<Stays> plans_of(const Segments& segments) { return SegmentTable(segments, segments.plain_peak).plans(); }

constexpr double kNever = 1e9;

// The least seconds of a deep_chain beyond a plain step, by Rotor's recurrence for equal blocks, written down once
// more: `length` operators whose input is there, within so many storages; the last one of the step is loss and has no
// gradient of its own.
class Recurrence {
 public:
  double seconds(int length, int storages, bool is_end) {
    const auto [found, is_new] = known_.try_emplace({length, storages, is_end}, kNever);
    if (!is_new) {
      return found->second;
    }
    const int gradient = is_end ? 0 : 1;
    double best = kNever;
    if (storages >= std::max(gradient + 1, 3)) {
      best = length == 1 ? 0 : seconds(length - 1, storages - 1, is_end);
    }
    for (int before = 1; before < length; ++before) {
      if (storages >= gradient + (before > 1 ? 2 : 1)) {
        best = std::min(best, before + seconds(length - before, storages - 1, is_end) +
                                  seconds(before, storages, /*is_end=*/false));
      }
    }
    return known_[{length, storages, is_end}] = best;
  }

 private:
  std::map<std::tuple<int, int, bool>, double> known_;
};

TEST(SegmentTable, IsAsFastAsTheRecurrenceForADeepChain) {
  constexpr int kLength = 40;
  const Simulator simulator(deep_chain(kLength));
  const double plain = simulator.profile().plain_seconds();
  const Segments segments = cut(simulator, kLength);
  ASSERT_EQ(segments.count(), kLength);
  const SegmentTable table(segments, segments.plain_peak);
  Recurrence recurrence;
  constexpr int kMost =
      35;  // of about 40: where there is room for nearly all, a descent from plain training is as fast
  for (int storages = 6; storages <= kMost; ++storages) {
    const auto plan = table.within(16 * storages);
    ASSERT_TRUE(plan.has_value()) << storages;
    const Simulation run = simulator.run(*plan);
    ASSERT_EQ(run.impossible, -1);
    // The recurrence counts no input of the first operator: it is external here, too. Slots round by less than one
    // storage.
    EXPECT_LE(run.peak_bytes, 16 * (storages + 1)) << storages;
    EXPECT_LE(run.seconds - plain, recurrence.seconds(kLength, storages - 1, true) + 1e-9) << storages;
  }
}

TEST(Solver, IsNoSlowerThanTheRecurrenceForADeepChain) {
  constexpr int kLength = 64;
  const Simulator simulator(deep_chain(kLength));
  const Simulation plain = simulator.run(keep_all(simulator.profile()));
  Recurrence recurrence;
  for (const int share : {95, 80, 50, 20, 15, 10}) {
    const int64_t budget = plain.peak_bytes * share / 100;
    const Answer answer = Solver(simulator).solve(budget);
    const auto* plan = std::get_if<Solution>(&answer);
    ASSERT_NE(plan, nullptr) << share << " %";
    EXPECT_LE(plan->seconds - plain.seconds, recurrence.seconds(kLength, static_cast<int>(budget / 16), true) + 1e-9)
        << share << " %";
  }
}

// Every other storage in turn is pinned.
Profile with_pinned(Profile profile, uint32_t seed) {
  for (size_t s = seed % 3; s < profile.storages.size(); s += 3) {
    if (profile.storages[s].kind == StorageKind::Activation) {
      profile.storages[s].kind = StorageKind::Pinned;
    }
  }
  return profile;
}

TEST(SegmentTable, HasPossiblePlansOnlyWhateverIsRandomOrPinned) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    for (const Profile& profile : {random_profile(seed, 20), with_pinned(random_profile(seed, 20), seed)}) {
      const Simulator simulator(profile);
      for (const Stays& plan : plans_of(cut(simulator, 12))) {
        ASSERT_EQ(simulator.run(plan).impossible, -1) << seed;
      }
    }
  }
}

// A buffer is written between two operators that read it: the first one never runs again, so what it made, and needs,
// stays.
TEST(SegmentTable, KeepsWhatReadAnOlderVersionOfAStorageFromOutside) {
  ProfileBuilder builder;
  const int buffer = builder.external(8);
  int x = builder.external(16);
  for (int i = 0; i < 12; ++i) {
    x = builder.op("reads", 1, 16, {x, buffer}, {x}, true);
    x = builder.op("goes on", 1, 16, {x}, {x}, true);
    if (i == 5) {
      builder.add("writes", 1, {buffer}, {}, {}, 0, /*replayable=*/false);
    }
  }
  const Simulator simulator(builder.finish());
  const auto plans = plans_of(cut(simulator, 12));
  ASSERT_GT(plans.size(), 3U);
  for (const Stays& plan : plans) {
    ASSERT_EQ(simulator.run(plan).impossible, -1);
  }
}

// Two backward passes, the one of the first half first: each goes through its operators in reverse.
TEST(Segments, AreKnownWhereTwoBackwardPassesFollowEachOther) {
  Profile profile = deep_chain(40);
  const auto backward = profile.events.end() - 5 * 40;  // five events each
  std::rotate(backward, backward + 5 * 20, profile.events.end());
  const Simulator simulator(deep_chain(40));
  const int in_order = cut(simulator, 20).count();
  std::vector<Event> events;
  for (const Event& event : profile.events) {
    if (event.kind != EventKind::Allocate &&
        event.kind != EventKind::Release) {  // no gradient goes from one to the other
      events.push_back(event);
    }
  }
  profile.events = events;
  EXPECT_GE(cut(Simulator(profile), 20).count(), in_order / 2);
}

TEST(Solver, TakesProfilesThatHaveNearlyNothing) {
  ProfileBuilder builder;
  int x = builder.external(16);
  builder.op("op", 1, 16, {x}, {});
  Profile profile = builder.finish();
  profile.storages.push_back({"never made", 16, StorageKind::Activation});
  profile.events.erase(std::remove_if(profile.events.begin(), profile.events.end(),
                                      [](const Event& e) { return e.kind == EventKind::Backward; }),
                       profile.events.end());
  const Simulator simulator(profile), nothing{Profile{}};
  for (const Simulator* one : {&simulator, &nothing}) {
    Solver solver(*one);
    EXPECT_TRUE(std::holds_alternative<Infeasible>(solver.solve(-3'000'000'000)));
    EXPECT_TRUE(std::holds_alternative<Solution>(solver.solve(1000)));
    EXPECT_LE(solver.smallest().peak_bytes, 32);
  }
}

TEST(SegmentTable, GivesFrugalPlansForALongChain) {
  for (const int random_every : {0, 10}) {
    const Simulator simulator(deep_chain(150, random_every));
    const Simulation plain = simulator.run(keep_all(simulator.profile()));
    const auto plans = plans_of(cut(simulator, 80));
    ASSERT_GT(plans.size(), 20U);
    int64_t least = plain.peak_bytes;
    for (const Stays& plan : plans) {
      least = std::min(least, simulator.run(plan).peak_bytes);
    }
    EXPECT_LT(least, plain.peak_bytes / 4);
  }
}

TEST(Segments, AreOfEqualLengthInAChain) {
  constexpr int kSegments = 80, kLength = 10;
  const Segments segments = cut(Simulator(deep_chain(kSegments * kLength)), kSegments);
  EXPECT_EQ(segments.count(), kSegments);
  for (const Segment& one : segments.list) {
    EXPECT_NEAR(one.last - one.first + 1, kLength, 1) << "from operator " << one.first;
  }
}

// A checkpoint every so many operators keeps one storage for each, and rebuilds those in between.
TEST(Solver, FindsALongChainAPeakAsSmallAsThatOfTheBestEvenCheckpoints) {
  constexpr int kLength = 2000, kStorage = 16;
  int least = kLength;
  for (int every = 1; every <= kLength; ++every) {
    least = std::min(least, (kLength + every - 1) / every + every);
  }
  const Simulator simulator(deep_chain(kLength));
  EXPECT_LE(Solver(simulator).smallest().peak_bytes, kStorage * least);
}

TEST(Segments, CoverAllOperatorsInOrderAndBeginBackwardsInReverse) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const Simulator simulator(random_profile(seed, 40));
    const Segments segments = cut(simulator, 10);
    ASSERT_LE(segments.count(), 10);
    int next = 0;
    for (int k = 0; k < segments.count(); ++k) {
      const Segment& one = segments.list[static_cast<size_t>(k)];
      ASSERT_EQ(one.first, next);
      ASSERT_LE(one.first, one.last);
      next = one.last + 1;
      if (k > 0) {
        ASSERT_LE(one.backward_begin, segments.list[static_cast<size_t>(k - 1)].backward_begin);
      }
    }
    ASSERT_EQ(next, static_cast<int>(simulator.profile().operators.size()));
  }
}

// As a compiled region does: one operator makes all that backward asks for, and backward never asks for what goes in.
TEST(Solver, RunsAnOperatorWithManySavedResultsAgainOnce) {
  ProfileBuilder builder;
  int x = builder.external(16);
  Stays checkpoints = {Stay::kept()};
  for (int i = 0; i < 12; ++i) {
    const int result = builder.fresh("region", 16);
    std::vector<int> saved;
    for (int k = 0; k < 4; ++k) {
      saved.push_back(builder.fresh("region", 64));
    }
    std::vector<int> made = saved;
    made.insert(made.begin(), result);
    builder.add("region", 1, made, {x}, saved);
    checkpoints.push_back(Stay::kept());
    checkpoints.insert(checkpoints.end(), 4, Stay::once_rebuilt());
    x = result;
  }
  const Simulator simulator(builder.finish());
  const Simulation by_hand = simulator.run(checkpoints);
  ASSERT_EQ(by_hand.replayed, 12);
  const Answer answer = Solver(simulator).solve(by_hand.peak_bytes);
  ASSERT_TRUE(std::holds_alternative<Solution>(answer));
  EXPECT_LE(std::get<Solution>(answer).seconds, by_hand.seconds);
}

TEST(Segments, AreNoneOfAProfileWithoutOperators) { EXPECT_EQ(cut(Simulator(Profile{}), 10).count(), 0); }

// A loop: each round reads the features, its state, and leaves an output that only the end of the step reads. So each
// cut is crossed by the features and by as many outputs as there were rounds.
Profile loop(int rounds) {
  ProfileBuilder builder;
  const int input = builder.external(400);
  const int features = builder.op("encode", 5, 400, {input}, {input});
  int state = builder.op("begin", 1, 100, {features}, {features});
  std::vector<int> outputs;
  for (int i = 0; i < rounds; ++i) {
    const int attention = builder.op("attend", 4, 400, {features, state}, {features, state}, true);
    const int gates = builder.op("gates", 2, 400, {attention, state}, {attention, state});
    const int active = builder.op("sigmoid", 1, 400, {gates}, {}, true);
    state = builder.op("state", 1, 100, {active, state}, {active, state});
    outputs.push_back(builder.op("out", 1, 10, {state}, {state}));
  }
  builder.op("stack", 1, 10, outputs, outputs);
  return builder.finish();
}

TEST(Solver, CutsALoopWhoseOutputsAllCrossEachCut) {
  const Simulator simulator(loop(60));
  const Simulation plain = simulator.run(keep_all(simulator.profile()));
  Solver solver(simulator);
  for (const int share : {50, 35, 25, 15}) {
    const Answer answer = solver.solve(plain.peak_bytes * share / 100);
    const auto* plan = std::get_if<Solution>(&answer);
    ASSERT_NE(plan, nullptr) << share << " %";
    EXPECT_LT(plan->seconds, 1.4 * plan->plain_seconds) << share << " %";
  }
}

TEST(Solver, RunsNoOperatorAgainManyTimesNearTheLeastMemory) {
  for (const Profile& profile : {loop(60), deep_chain(150), testing::gpt_profile(12)}) {
    const Simulator simulator(profile);
    const Solution least = Solver(simulator, {.work = 1'000'000}).smallest();
    const Simulation run = simulator.run(least.stays);
    EXPECT_LE(run.replayed, std::max<int64_t>(1000, 16 * std::ssize(profile.operators)));
    EXPECT_LT(run.seconds, 4 * least.plain_seconds);
  }
}

TEST(Room, GivesWhatIsFreeInAllOfTheEvents) {
  Room room({3, 5, 1, 9, 2}, 10);
  EXPECT_FALSE(room.take(0, 4, 2));
  EXPECT_TRUE(room.take(0, 4, 1));
  EXPECT_FALSE(room.take(3, 3, 1));
  EXPECT_TRUE(room.take(0, 2, 4));
  EXPECT_FALSE(room.take(1, 1, 1));
  EXPECT_TRUE(room.take(0, 0, 2));
  EXPECT_TRUE(room.take(2, 2, 4));
  EXPECT_FALSE(room.take(2, 2, 1));
  EXPECT_TRUE(room.take(4, 4, 7));
}

}  // namespace
}  // namespace snug::plan::segments_test
