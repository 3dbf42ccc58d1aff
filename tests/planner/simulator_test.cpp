// The simulator against an executor that follows its replays with real buffers, and the data that both read.

#include "src/planner/simulator.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "tests/planner/sample_profiles.h"

namespace snug::plan::simulator_test {
namespace {

using testing::gpt_profile;
using ::testing::HasSubstr;
using testing::ProfileBuilder;
using testing::random_profile;

size_t at(int index) { return static_cast<size_t>(index); }

// Runs a step on buffers that hold a hash of how they were computed. What stays is decided by looking at all that is
// still to come, afresh each time.
class Executor {
 public:
  Executor(const Profile& profile, const Stays& plan, const std::vector<Replay>& replays)
      : profile_(profile), plan_(plan) {
    for (const Replay& replay : replays) {
      replays_[replay.event] = replay.operators;
      loads_[replay.event] = replay.loads;
    }
    for (size_t s = 0; s < plan.size(); ++s) {
      originals_.push_back(s * 7919 + 1);
    }
  }

  void run() {
    for (int e = 0; e < static_cast<int>(profile_.events.size()); ++e) {
      const Event& event = profile_.events[at(e)];
      switch (event.kind) {
        case EventKind::Forward:
          compute(event.index, buffers_, originals_);
          for (const Value& value : profile_.operators[at(event.index)].writes) {
            originals_[at(value.storage)] = buffers_[value.storage];
            program_[value.storage] = true;
          }
          break;
        case EventKind::Drop:
          program_[event.index] = false;
          offload(e, event.index);
          break;
        case EventKind::Unpack:
          if (profile_.storages[at(event.index)].kind != StorageKind::External) {
            replay(e, event.index);
            ASSERT_TRUE(buffers_.contains(event.index));
            ASSERT_EQ(buffers_[event.index], originals_[at(event.index)]) << "a rebuilt value differs";
            ++uses_[event.index];
          }
          break;
        case EventKind::Done:
          --uses_[event.index];
          break;
        case EventKind::Allocate:
          own_ += event.bytes;
          note(0);
          break;
        case EventKind::Release:
          own_ -= event.bytes;
          break;
        case EventKind::Backward:
          seconds += profile_.backward[at(event.index)].seconds;
          break;
      }
      collect(e);
    }
  }

  int64_t peak = 0;
  double seconds = 0;
  int offloaded = 0;
  bool leaves_nothing() const { return buffers_.empty(); }

 private:
  using Buffers = std::map<int, uint64_t>;

  // `fallback`: contents of what is not in `target`.
  void compute(int index, Buffers& target, const std::vector<uint64_t>& fallback) {
    const Operator& op = profile_.operators[at(index)];
    uint64_t hash = static_cast<uint64_t>(index) + 17;
    const auto mix = [&](int s) {
      hash = (hash ^ (target.contains(s) ? target[s] : fallback[at(s)])) * 0x100000001b3ULL;
    };
    for (const Value& value : op.reads) {
      mix(value.storage);
    }
    for (const Value& value : op.writes) {
      if (value.version > 0) {
        mix(value.storage);
      }
    }
    for (const Value& value : op.writes) {
      target[value.storage] = hash + static_cast<uint64_t>(value.storage);
    }
    seconds += op.seconds;
    note(op.workspace);
  }

  // What backward has not asked for yet goes, if somebody will.
  void offload(int e, int s) {
    if (plan_[at(s)] != Stay::offloaded() || !needed_after(s, e)) {
      return;
    }
    held_[s] = asked_[s];
    if (!asked_[s]) {
      away_[s] = buffers_[s];
      seconds += profile_.link.out_seconds(profile_.storages[at(s)].bytes);
      ++offloaded;
    }
  }

  void replay(int e, int target) {
    for (const int s : loads_[e]) {
      ASSERT_TRUE(away_.contains(s) && !buffers_.contains(s));
      buffers_[s] = away_[s];
      held_[s] = true;
      seconds += profile_.link.back_seconds(profile_.storages[at(s)].bytes);
      note(0);
    }
    asked_[target] = true;
    for (const int op : replays_[e]) {
      for (const Value& value : profile_.operators[at(op)].reads) {
        asked_[value.storage] = asked_[value.storage] || value.version == last_version(value.storage);
      }
    }
    if (!replays_.contains(e)) {
      return;
    }
    const std::vector<int>& ops = replays_[e];
    std::vector<uint64_t> contents(plan_.size(), 0xdead);  // what is not there is rubbish
    for (size_t s = 0; s < contents.size(); ++s) {
      const int id = static_cast<int>(s);
      contents[s] = buffers_.contains(id)                                ? buffers_[id]
                    : profile_.storages[s].kind == StorageKind::External ? originals_[s]
                                                                         : 0xdead;
    }
    for (size_t k = 0; k < ops.size(); ++k) {
      compute(ops[k], scratch_, contents);
      std::erase_if(scratch_, [&](const auto& entry) {
        const int s = entry.first;
        bool finished = true;  // does the rest of this replay write it?
        bool needed = false;
        for (size_t later = k + 1; later < ops.size(); ++later) {
          const Operator& op = profile_.operators[at(ops[later])];
          // The original serves who reads the last version; see rule 3.
          needed = needed || std::ranges::any_of(op.reads, [&](Value v) {
                     return v.storage == s && !(buffers_.contains(s) && v.version == last_version(s));
                   });
          const bool writes = std::ranges::any_of(op.writes, [&](Value v) { return v.storage == s && v.version > 0; });
          needed = needed || writes;
          finished = finished && !writes;
        }
        const bool original = buffers_.contains(s) || !complete(s, ops);
        const bool wanted = s == target || (plan_[at(s)].holds_rebuilt_at(e) && needed_after(s, e));
        return !needed && !(finished && !original && wanted);
      });
    }
    for (const auto& [s, content] : scratch_) {
      buffers_[s] = content;
      held_[s] = plan_[at(s)].holds_rebuilt_at(e);
    }
    scratch_.clear();
  }

  int last_version(int s) const {
    int version = 0;
    for (const Operator& op : profile_.operators) {
      for (const Value& value : op.writes) {
        version = value.storage == s ? value.version : version;
      }
    }
    return version;
  }

  bool complete(int s, const std::vector<int>& ops) const {
    return std::ranges::any_of(ops, [&](int index) {
      return std::ranges::count(profile_.operators[at(index)].writes, Value{s, last_version(s)}) > 0;
    });
  }

  // Does anything after event e read storage s, without making it itself?
  bool needed_after(int s, int e) const {
    for (int later = e + 1; later < static_cast<int>(profile_.events.size()); ++later) {
      const Event& event = profile_.events[at(later)];
      const auto found = replays_.find(later);
      const std::vector<int> ops = found == replays_.end() ? std::vector<int>{} : found->second;
      if (const auto loads = loads_.find(later); loads != loads_.end() && std::ranges::count(loads->second, s) > 0) {
        return true;
      }
      if (event.kind == EventKind::Unpack && event.index == s && !complete(s, ops)) {
        return true;
      }
      const bool reads = std::ranges::any_of(ops, [&](int index) {
        return std::ranges::count(profile_.operators[at(index)].reads, Value{s, last_version(s)}) > 0;
      });
      if (reads && !complete(s, ops)) {
        return true;
      }
      if (event.kind == EventKind::Done && event.index == s && plan_[at(s)] == Stay::kept()) {
        return true;
      }
    }
    return false;
  }

  void collect(int e) {
    std::erase_if(buffers_, [&](const auto& entry) {
      const int s = entry.first;
      const bool stays =
          program_[s] || uses_[s] > 0 || ((plan_[at(s)] == Stay::kept() || held_[s]) && needed_after(s, e));
      held_[s] = held_[s] && stays;
      return !stays;
    });
  }

  void note(int64_t workspace) {
    int64_t live = own_ + workspace;
    for (const Buffers* buffers : {&buffers_, &scratch_}) {
      for (const auto& entry : *buffers) {
        live += profile_.storages[at(entry.first)].bytes;
      }
    }
    peak = std::max(peak, live);
  }

  const Profile& profile_;
  const Stays& plan_;
  std::map<int, std::vector<int>> replays_, loads_;
  std::vector<uint64_t> originals_;
  Buffers buffers_, scratch_, away_;
  std::map<int, bool> program_, held_, asked_;  // asked for by the backward pass
  std::map<int, int> uses_;
  int64_t own_ = 0;
};

TEST(Simulator, GivesTheBytesAndSecondsOfAnExecutorThatReallyComputes) {
  int ran = 0;
  int replayed = 0;
  int offloaded = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    Profile profile = random_profile(seed, 6 + static_cast<int>(seed % 20));
    profile.link = {.out_bytes_per_second = 1e5, .back_bytes_per_second = 3e5, .seconds = 1e-4};
    const Simulator simulator(std::move(profile));
    std::mt19937 random(seed);
    for (int trial = 0; trial < 5; ++trial) {
      Stays plan = keep_all(simulator.profile());
      for (Stay& stay : plan) {
        const uint32_t choice = static_cast<uint32_t>(random()) % 8;
        const int somewhere = static_cast<int>(random() % simulator.profile().events.size());
        stay = choice < 2    ? Stay::kept()
               : choice == 2 ? Stay::once_rebuilt()
               : choice == 3 ? Stay::never()
               : choice == 4 ? Stay::from(somewhere)
               : choice < 7  ? Stay::offloaded()
                             : stay;
      }
      const Simulation simulated = simulator.run(plan);
      if (simulated.impossible >= 0) {
        continue;
      }
      Executor executor(simulator.profile(), plan, simulated.replays);
      executor.run();
      ASSERT_EQ(simulated.peak_bytes, executor.peak) << "seed " << seed << ", trial " << trial;
      ASSERT_NEAR(simulated.seconds, executor.seconds, 1e-9);
      ASSERT_TRUE(executor.leaves_nothing());
      ++ran;
      replayed += simulated.replays.empty() ? 0 : 1;
      ASSERT_EQ(simulated.offloaded.size(), at(executor.offloaded));
      offloaded += executor.offloaded > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(ran, 500);
  EXPECT_GT(replayed, 400);
  EXPECT_GT(offloaded, 400);
}

TEST(Simulator, CallsAPlanImpossibleThatDropsARandomResult) {
  ProfileBuilder builder;
  const int x = builder.external(8);
  const int mask = builder.op("bernoulli", 1, 8, {x}, {}, true, 0, false);
  const Simulator simulator(builder.finish());
  Stays plan = keep_all(simulator.profile());
  EXPECT_EQ(simulator.run(plan).impossible, -1);
  plan[at(mask)] = Stay::never();
  EXPECT_EQ(simulator.run(plan).impossible, mask);
}

TEST(Simulator, OffloadsARandomResultWhereThereIsALinkAndOnlyThere) {
  ProfileBuilder builder;
  const int x = builder.external(8);
  const int mask = builder.op("bernoulli", 1, 8, {x}, {}, true, 0, false);
  builder.op("use", 1, 100, {mask});
  Profile profile = builder.finish();
  Stays plan = keep_all(profile);
  plan[at(mask)] = Stay::offloaded();
  EXPECT_THROW(Simulator(profile).run(plan), ConfigError);
  profile.link = {.out_bytes_per_second = 4, .back_bytes_per_second = 2, .seconds = 0.5};
  const Simulation run = Simulator(profile).run(plan);
  EXPECT_EQ(run.impossible, -1);
  EXPECT_EQ(run.seconds, profile.plain_seconds() + (0.5 + 2) + (0.5 + 4));
  EXPECT_EQ(run.offloaded, std::vector<int>{mask});
}

// A result of 8 bytes that streams at 1 second a way, among operators of 10 seconds.
struct Streaming {
  explicit Streaming(int operators_after) {
    ProfileBuilder builder;
    const int x = builder.external(8);
    streamed = builder.op("streamed", 10, 8, {x});
    int last = builder.op("reads", 10, 1, {streamed}, {streamed});
    for (int i = 0; i < operators_after; ++i) {
      last = builder.op("after", 10, 1, {last}, {}, true);
    }
    profile = builder.finish();
    profile.link = {.out_bytes_per_second = 8, .back_bytes_per_second = 8};
    plan = keep_all(profile);
    plan[at(streamed)] = Stay::streamed();
  }

  int streamed;
  Profile profile;
  Stays plan;
};

TEST(Simulator, WaitsForNoStreamThatHasTheTime) {
  Streaming step(4);
  const Simulator simulator(step.profile);
  const Simulation run = simulator.run(step.plan);
  EXPECT_EQ(run.seconds, step.profile.plain_seconds());
  const Event& written = step.profile.events[at(run.written_by[at(step.streamed)])];
  EXPECT_EQ(written, (Event{EventKind::Forward, 3})) << "the first operator that begins a second after the drop";
  const int fetched = run.fetched_at[at(step.streamed)];
  ASSERT_GE(fetched, 0);
  EXPECT_EQ(step.profile.events[at(fetched)].kind, EventKind::Unpack);
  // It is there until the program has waited for it, and from the beginning of its way back on.
  step.plan[at(step.streamed)] = Stay::kept();
  const Simulation kept = simulator.run(step.plan);
  for (int e = 0; e < static_cast<int>(kept.high.size()); ++e) {
    const bool is_away = e > run.written_by[at(step.streamed)] && e < fetched;
    if (e != run.written_by[at(step.streamed)]) {
      EXPECT_EQ(run.high[at(e)], kept.high[at(e)] - (is_away ? 8 : 0)) << e;
    }
  }
}

TEST(Simulator, WaitsForAStreamThatHasNoTime) {
  const Streaming step(0);  // backward begins where the way out begins, and asks at once
  const Simulation run = Simulator(step.profile).run(step.plan);
  EXPECT_EQ(run.written_by[at(step.streamed)], -1);
  EXPECT_EQ(run.fetched_at[at(step.streamed)], -1);
  EXPECT_EQ(run.seconds, step.profile.plain_seconds() + 2);
}

TEST(Simulator, HasNoMoreThanTwoStreamsOnTheirWay) {
  ProfileBuilder builder;
  const int x = builder.external(8);
  std::vector<int> results;
  for (int i = 0; i < 6; ++i) {
    results.push_back(builder.op("op", 0.25, 8, {x}, {}, true));  // a fourth of the time of its way out
  }
  Profile profile = builder.finish();
  profile.link = {.out_bytes_per_second = 8, .back_bytes_per_second = 8e9};
  Stays plan = keep_all(profile);
  for (const int s : results) {
    plan[at(s)] = Stay::streamed();
  }
  const Simulation run = Simulator(profile).run(plan);
  const auto last_forward = std::ranges::find(profile.events, Event{EventKind::Forward, 5});
  EXPECT_EQ(run.high[at(static_cast<int>(last_forward - profile.events.begin()))], 3 * 8) << "its own, and two";
  EXPECT_GT(run.seconds, 6) << "as long as six ways out";
}

TEST(Simulator, DoesNotOffloadWhatBackwardHasAskedForWhileTheProgramStillHadIt) {
  ProfileBuilder builder;
  const int x = builder.external(8);
  const int held = builder.op("held", 1, 8, {x}, {}, true);
  builder.op("other", 1, 8, {x}, {held});
  Profile profile = builder.finish();
  const auto drop = std::ranges::find(profile.events, Event{EventKind::Drop, held});
  const auto first_done = std::ranges::find(profile.events, Event{EventKind::Done, held});
  ASSERT_LT(drop, first_done);
  std::rotate(drop, drop + 1, first_done);  // the program lets go of it between two uses by backward
  profile.link = {.out_bytes_per_second = 1, .back_bytes_per_second = 1};
  Stays plan = keep_all(profile);
  const Simulation kept = Simulator(profile).run(plan);
  plan[at(held)] = Stay::offloaded();
  const Simulation run = Simulator(profile).run(plan);
  EXPECT_EQ(run.seconds, kept.seconds);
  EXPECT_TRUE(run.offloaded.empty() && run.replays.empty());
}

int64_t sum_of(const AtPeak& peak) { return std::accumulate(peak.bytes.begin(), peak.bytes.end(), int64_t{0}); }

TEST(Simulator, SortsThePeakByKindToTheByteUnderAnyPlan) {
  std::array<int, AtPeak::kKinds> seen = {};
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    Profile profile = random_profile(seed, 10 + static_cast<int>(seed % 30));
    profile.link = {.out_bytes_per_second = 1e5, .back_bytes_per_second = 1e5, .seconds = 1e-4};
    const Simulator simulator(std::move(profile));
    std::mt19937 random(seed);
    for (int k = 0; k < 40; ++k) {
      Stays plan = keep_all(simulator.profile());
      for (Stay& stay : plan) {
        const Stay choices[] = {stay, Stay::never(), Stay::once_rebuilt(), Stay::offloaded(), Stay::streamed()};
        stay = choices[random() % 5];
      }
      const Simulation run = simulator.run(plan);
      if (run.impossible >= 0) {
        continue;
      }
      const AtPeak peak = simulator.at_peak(plan);
      ASSERT_EQ(sum_of(peak), run.peak_bytes) << seed << ", plan " << k;
      for (size_t kind = 0; kind < peak.bytes.size(); ++kind) {
        ASSERT_GE(peak.bytes[kind], 0) << seed << ", kind " << kind;
        seen[kind] += peak.bytes[kind] > 0 ? 1 : 0;
      }
    }
  }
  for (const auto kind : {AtPeak::Operator, AtPeak::Replay, AtPeak::Kept, AtPeak::HeldForUse, AtPeak::OnTheirWay}) {
    EXPECT_GT(seen[kind], 0) << static_cast<int>(kind);
  }
}

// Three results of 100 bytes, each made from the one before. The program holds the first until the last operator.
Profile held_by_the_program(bool last_reads_the_first) {
  ProfileBuilder builder;
  const int x = builder.external(8);
  const int first = builder.op("first", 1, 100, {x}, {}, true);
  const int second = builder.op("second", 1, 100, {first}, {}, true);
  const int third = builder.op("third", 1, 100, {second}, {}, true, 500);
  builder.op("loss", 1, 4, last_reads_the_first ? std::vector<int>{first, third} : std::vector<int>{third});
  Profile profile = builder.finish();
  if (!last_reads_the_first) {
    const auto drop = std::ranges::find(profile.events, Event{EventKind::Drop, first});
    std::rotate(drop, drop + 1, std::ranges::find(profile.events, Event{EventKind::Forward, 3}));
  }
  return profile;
}

TEST(Simulator, TellsWhatTheProgramHoldsAtThePeakAndForWhat) {
  for (const bool is_used_later : {false, true}) {
    const Simulator simulator(held_by_the_program(is_used_later));
    for (const Stay stay : {Stay::never(), Stay::kept()}) {
      const AtPeak peak = simulator.at_peak(Stays(simulator.profile().storages.size(), stay));
      EXPECT_EQ(peak.runs, "third");
      EXPECT_EQ(peak.bytes[AtPeak::Operator], 700);
      EXPECT_EQ(peak.bytes[is_used_later ? AtPeak::HeldForUse : AtPeak::HeldIdle], 100);
      EXPECT_EQ(sum_of(peak), 800);
    }
  }
}

TEST(Simulator, CountsWhatCannotBeRebuiltAsKeptAlthoughTheProgramHoldsIt) {
  Profile profile = held_by_the_program(false);
  profile.operators[0].replayable = false;
  const Simulator simulator(profile);
  const AtPeak peak = simulator.at_peak(keep_all(profile));
  EXPECT_EQ(peak.bytes[AtPeak::Kept], 100);
  EXPECT_EQ(peak.bytes[AtPeak::HeldIdle], 0);
}

TEST(Simulator, TellsGradientsOfParametersFromGradientsOfResultsAtThePeak) {
  ProfileBuilder builder;
  int x = builder.external(8);
  for (int i = 0; i < 3; ++i) {
    x = builder.op("linear", 1, 100, {x}, {x});
    builder.parameters(1000);
  }
  const Simulator simulator(builder.finish());
  const AtPeak peak = simulator.at_peak(keep_all(simulator.profile()));
  EXPECT_EQ(peak.runs, "linear_backward") << "the last, which makes the third gradient";
  EXPECT_EQ(peak.bytes[AtPeak::Gradients], 2000);
  EXPECT_EQ(peak.bytes[AtPeak::OnTheirWay], 100);
  EXPECT_EQ(peak.bytes[AtPeak::Operator], 1100);
}

// Operators that each save their input: with nothing kept, every one of them needs all that went before.
Profile chain_that_saves(int length) {
  ProfileBuilder builder;
  int x = builder.external(16);
  for (int i = 0; i < length; ++i) {
    x = builder.op("op", 1, 16, {x}, {x});
  }
  return builder.finish();
}

TEST(Simulator, LooksAtEachOperatorThatRunsAgainOnlyAFewTimes) {
  for (const int length : {10, 100, 1000}) {
    const Simulator simulator(chain_that_saves(length));
    const Simulation run = simulator.run(Stays(simulator.profile().storages.size(), Stay::never()));
    EXPECT_EQ(run.replayed, int64_t{length} * (length - 1) / 2);
    EXPECT_LT(run.steps, 8 * run.replayed + 8 * std::ssize(simulator.profile().events));
  }
}

TEST(Simulator, IsCutShortWhereMoreRunsAgainThanIsAllowed) {
  const Simulator simulator(chain_that_saves(100));
  const Stays plan(simulator.profile().storages.size(), Stay::never());
  const int64_t replayed = simulator.run(plan).replayed;
  EXPECT_FALSE(simulator.run(plan, replayed).is_cut_short);
  const Simulation less = simulator.run(plan, 50);
  EXPECT_TRUE(less.is_cut_short);
  EXPECT_EQ(less.replayed, 51);
}

TEST(Simulator, CountsTheTapeOfAPlanThatDoesNotKeepEverything) {
  Profile profile = chain_that_saves(4);
  profile.host_seconds = 0.125;
  const Stays never(profile.storages.size(), Stay::never());
  const double plain = profile.plain_seconds(), planned = Simulator(profile).run(never).seconds;
  profile.tape_seconds = 0.25;
  const Simulator simulator(profile);
  EXPECT_EQ(simulator.run(keep_all(profile)).seconds, plain);
  EXPECT_EQ(simulator.run(never).seconds, planned + 0.25);
}

TEST(StepProfile, TakesAsLongAsTheSlowerOfHostAndDevice) {
  Profile profile = chain_that_saves(4);
  profile.host_seconds = 8;
  profile.tape_seconds = 2;
  EXPECT_EQ(profile.step_seconds(16, /*has_tape=*/true), 16 + 8 + 2) << "a CPU is the host";
  profile.device = "cuda:0";
  EXPECT_EQ(profile.step_seconds(16, /*has_tape=*/true), 16);
  EXPECT_EQ(profile.step_seconds(4, /*has_tape=*/false), 8);
  EXPECT_EQ(profile.step_seconds(4, /*has_tape=*/true), 8 + 2);
  const auto calls = static_cast<double>(profile.operators.size() + profile.backward.size());
  EXPECT_DOUBLE_EQ(profile.step_seconds(4, /*has_tape=*/true, /*replayed=*/3), 8 + 2 + 3 * 8 / calls);
}

TEST(StepProfile, ReadsBackAsItWasWritten) {
  Profile profile = random_profile(3, 12);
  EXPECT_EQ(Profile::from_json(profile.to_json()), profile);
  profile.host_seconds = 0.125;
  profile.tape_seconds = 0.25;
  EXPECT_EQ(Profile::from_json(profile.to_json()), profile);
  profile.link = {
      .directory = "/scratch", .out_bytes_per_second = 1e9, .back_bytes_per_second = 1.1e9, .seconds = 1e-4};
  EXPECT_EQ(Profile::from_json(profile.to_json()), profile);
  EXPECT_THROW(Profile::from_json("{}"), ConfigError);
  std::string other = profile.to_json();
  other.replace(other.find(":1,"), 3, ":9,");
  EXPECT_THAT([&] { Profile::from_json(other); },
              ::testing::ThrowsMessage<ConfigError>(HasSubstr("format version is 9")));
}

TEST(StepProfile, RefusesEventsThatCannotHaveHappened) {
  const Profile good = random_profile(1, 8);
  Profile twice = good;
  twice.events.insert(twice.events.begin(), twice.events.front());
  EXPECT_THAT([&] { twice.check(); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("was due")));
  Profile lost = good;
  std::erase_if(lost.events, [](const Event& event) { return event.kind == EventKind::Done; });
  EXPECT_THAT([&] { lost.check(); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("never done with")));
  Profile backwards = good;
  backwards.link.out_bytes_per_second = -1;
  EXPECT_THAT([&] { backwards.check(); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("link")));
  Profile early = good;
  early.operators[1].reads = {{good.operators.back().writes[0].storage, 0}};
  EXPECT_THAT([&] { early.check(); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("operator 1")));
}

}  // namespace
}  // namespace snug::plan::simulator_test
