// The profile of a large micro-batch from two small ones: exact where bytes are linear in the items, and none where the
// two are not alike.

#include "src/planner/extrapolate.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "src/planner/solver.h"
#include "tests/planner/sample_profiles.h"

namespace snug::plan::extrapolate_test {
namespace {

using testing::ProfileBuilder;

// A step whose bytes and seconds are linear in its items, with parts that stay the same.
Profile step_of(int64_t items, int operators = 4) {
  ProfileBuilder builder;
  const auto seconds = 0.5 + 0.25 * static_cast<double>(items);
  int x = builder.external(64 * items);
  const int weight = builder.external(4096);
  for (int i = 0; i < operators; ++i) {
    x = builder.op("layer", seconds, 256 * items + 48, {x, weight}, {x}, i % 2 == 0, 32 * items + 512);
    builder.parameters(4096);
  }
  builder.op("loss", seconds, 4, {x}, {x});
  Profile profile = builder.finish();
  profile.host_seconds = 0.125;
  profile.tape_seconds = 0.0625;
  return profile;
}

TEST(Extrapolated, GoesOnAlongTheLineThroughBothProfiles) {
  const Profile small = step_of(2), large = step_of(4);
  for (const int64_t items : {4, 5, 8, 64}) {
    SCOPED_TRACE(items);
    const auto found = extrapolated({small, 2}, {large, 4}, items);
    ASSERT_TRUE(found);
    EXPECT_EQ(*found, step_of(items));
    found->check();
  }
}

TEST(Extrapolated, GoesBackAlongItAsWell) {
  const auto found = extrapolated({step_of(4), 4}, {step_of(8), 8}, 2);
  ASSERT_TRUE(found);
  EXPECT_EQ(*found, step_of(2));
}

TEST(Extrapolated, TellsTheSmallestPeakOfTheWhole) {
  const auto smallest = [](const Profile& profile) { return Solver(Simulator(profile)).smallest().peak_bytes; };
  const auto found = extrapolated({step_of(2, 12), 2}, {step_of(4, 12), 4}, 32);
  ASSERT_TRUE(found);
  EXPECT_EQ(smallest(*found), smallest(step_of(32, 12)));
}

TEST(Extrapolated, HasNoBytesBelowZeroAndSecondsBetweenConstantAndProportionalOnes) {
  Profile small = step_of(2);
  const Profile large = step_of(4);
  small.storages[1].bytes = 8192;  // as it grows, it gets smaller
  small.operators[0].workspace = 1 << 20;
  small.operators[0].seconds = 100;
  small.backward[0].seconds = 100;
  small.host_seconds = 100;
  const auto found = extrapolated({small, 2}, {large, 4}, 64);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->storages[1].bytes, 0);
  EXPECT_EQ(found->operators[0].workspace, 0);
  EXPECT_EQ(found->operators[0].seconds, large.operators[0].seconds);
  EXPECT_EQ(found->backward[0].seconds, large.backward[0].seconds);
  EXPECT_EQ(found->host_seconds, large.host_seconds);
  small.operators[0].seconds = 0;
  EXPECT_EQ(extrapolated({small, 2}, {large, 4}, 64)->operators[0].seconds, 16 * large.operators[0].seconds);
  EXPECT_EQ(extrapolated({small, 2}, {large, 4}, 2)->operators[0].seconds, large.operators[0].seconds / 2);
}

// Another process may stop this one in any operator.
TEST(Extrapolated, TakesATimeThatIsTooLongForFewerItemsAsInProportion) {
  const Profile small = step_of(2);
  Profile large = step_of(4);
  large.operators[1].seconds *= 20;
  large.backward[2].seconds *= 20;
  const Profile found = *extrapolated({small, 2}, {large, 4}, 8);
  EXPECT_EQ(found.operators[1].seconds, 2 * 4 * small.operators[1].seconds);
  EXPECT_EQ(found.backward[2].seconds, 2 * 4 * small.backward[2].seconds);
  EXPECT_EQ(found.operators[0], step_of(8).operators[0]);
}

TEST(LimitTimes, TakesTheForeseenTimeForATimeMoreThanTwiceAsLong) {
  const Profile foreseen = step_of(8);
  Profile found = foreseen;
  found.operators[0].seconds *= 1.9;
  found.operators[1].seconds *= 2.1;
  found.operators[2].seconds /= 10;
  found.backward[0].seconds *= 50;
  found.host_seconds *= 3;
  Profile expected = found;
  expected.operators[1].seconds = foreseen.operators[1].seconds;
  expected.backward[0].seconds = foreseen.backward[0].seconds;
  expected.host_seconds = foreseen.host_seconds;
  Profile of_other_work = found;
  of_other_work.storages[0].bytes += 1;
  limit_times(found, foreseen);
  EXPECT_EQ(found, expected);
  Profile of_a_slower_step = foreseen;
  for (Operator& one : of_a_slower_step.operators) {
    one.seconds *= 3;
  }
  const Profile slower = of_a_slower_step;
  limit_times(of_a_slower_step, foreseen);
  EXPECT_EQ(of_a_slower_step, slower);
  const Profile before = of_other_work;
  limit_times(of_other_work, foreseen);
  EXPECT_EQ(of_other_work, before);
}

TEST(Extrapolated, IsNoneWhereTheTwoAreNotAlike) {
  const std::vector<std::pair<std::string, std::function<void(Profile&)>>> others = {
      {"another operator", [](Profile& of) { of.operators[1].name = "other"; }},
      {"one more operator", [](Profile& of) { of = step_of(4, 5); }},
      {"another operand", [](Profile& of) { of.operators[1].reads.pop_back(); }},
      {"another result", [](Profile& of) { of.operators[1].writes[0].version += 1; }},
      {"a random one", [](Profile& of) { of.operators[1].replayable = false; }},
      {"memory of another kind", [](Profile& of) { of.storages[2].kind = StorageKind::Pinned; }},
      {"another moment", [](Profile& of) { std::swap(of.events[0], of.events[1]); }},
      {"one more event", [](Profile& of) { of.events.push_back({EventKind::Allocate, 0, 8}); }},
      {"one more backward operator", [](Profile& of) { of.backward.push_back({"more", 1}); }},
      {"another device", [](Profile& of) { of.device = "cuda:0"; }},
  };
  const Profile small = step_of(2);
  for (const auto& [name, change] : others) {
    SCOPED_TRACE(name);
    Profile large = step_of(4);
    ASSERT_TRUE(extrapolated({small, 2}, {large, 4}, 8));
    change(large);
    EXPECT_FALSE(extrapolated({small, 2}, {large, 4}, 8));
  }
}

TEST(Extrapolated, IsNoneForTwoOfTheSameItems) {
  EXPECT_FALSE(extrapolated({step_of(4), 4}, {step_of(4), 4}, 8));
  EXPECT_FALSE(extrapolated({step_of(4), 4}, {step_of(2), 2}, 8));
}

// A profile of more items may rise where the profile of fewer items falls.
TEST(SamePlaces, LeaveOutChangesOfMemory) {
  const Profile few = step_of(2);
  Profile many = step_of(4);
  const auto backward =
      std::ranges::find_if(many.events, [](const Event& event) { return event.kind == EventKind::Backward; });
  const auto at = static_cast<size_t>(backward - many.events.begin());
  many.events.insert(backward, {EventKind::Allocate, 0, 8});
  many.events.push_back({EventKind::Release, 0, 8});
  const auto places = same_places(few, many), back = same_places(many, few);
  ASSERT_TRUE(places && back);
  for (size_t e = 0; e < few.events.size(); ++e) {
    const Event &here = few.events[e], &there = many.events[static_cast<size_t>((*places)[e])];
    if (here.kind != EventKind::Allocate && here.kind != EventKind::Release) {
      EXPECT_EQ(std::pair(there.kind, there.index), std::pair(here.kind, here.index));
      EXPECT_EQ((*back)[static_cast<size_t>((*places)[e])], static_cast<int>(e));
    }
  }
  EXPECT_EQ((*places)[at], static_cast<int>(at) + 1);
  EXPECT_FALSE(extrapolated({few, 2}, {many, 4}, 8));
  many.events.insert(many.events.begin() + static_cast<std::ptrdiff_t>(at), {EventKind::Backward, 0, 0});
  EXPECT_FALSE(same_places(few, many));
  EXPECT_FALSE(same_places(few, step_of(2, 5)));
}

}  // namespace
}  // namespace snug::plan::extrapolate_test
