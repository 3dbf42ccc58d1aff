#include "src/memory/allocation_log.h"

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace snug::detail::allocation_log_test {
namespace {

const void* address(uintptr_t n) { return reinterpret_cast<const void*>(n * 64); }

/// (bytes, saved, alive) of each block alive at the peak.
std::multiset<std::tuple<int64_t, bool, bool>> at_peak(const AllocationLog& log) {
  std::multiset<std::tuple<int64_t, bool, bool>> result;
  for (const auto& block : log.alive_at_peak()) {
    result.emplace(block.bytes, block.saved, block.alive);
  }
  return result;
}

TEST(AllocationLog, KnowsLevelAndPeakAndWhoWasAliveThen) {
  AllocationLog log;
  log.allocate(address(1), 100);
  log.allocate(address(2), 50);
  log.release(address(1), 100);
  log.allocate(address(3), 70);
  EXPECT_EQ(log.level(), 120);
  EXPECT_EQ(log.peak(), 150);
  EXPECT_EQ(at_peak(log), (std::multiset<std::tuple<int64_t, bool, bool>>{{100, false, false}, {50, false, true}}));
  EXPECT_FALSE(log.knows(address(1)));
  EXPECT_TRUE(log.knows(address(2)));
}

TEST(AllocationLog, OfTwoEqualPeaksTheFirstCounts) {
  AllocationLog log;
  log.allocate(address(1), 100);
  log.release(address(1), 100);
  log.allocate(address(1), 60);
  log.allocate(address(2), 40);
  EXPECT_EQ(at_peak(log), (std::multiset<std::tuple<int64_t, bool, bool>>{{100, false, false}}));
}

TEST(AllocationLog, ABlockFromBeforeTheLogOnlyLowersTheLevel) {
  AllocationLog log;
  log.release(address(9), 30);
  EXPECT_EQ(log.level(), -30);
  EXPECT_EQ(log.peak(), 0);
  log.allocate(address(1), 20);
  EXPECT_EQ(log.peak(), 0) << "30 bytes fewer and 20 more is less than at the start";
  EXPECT_TRUE(log.alive_at_peak().empty());
}

TEST(AllocationLog, AReusedAddressIsAnotherBlock) {
  AllocationLog log;
  log.allocate(address(1), 100);
  log.mark_saved(address(1));
  log.release(address(1), 100);
  log.allocate(address(1), 10);
  log.mark_saved(address(7));  // unknown: no effect
  EXPECT_EQ(at_peak(log), (std::multiset<std::tuple<int64_t, bool, bool>>{{100, true, false}}));
  log.allocate(address(2), 200);
  EXPECT_EQ(at_peak(log), (std::multiset<std::tuple<int64_t, bool, bool>>{{10, false, true}, {200, false, true}}));
}

TEST(AllocationLog, ABlockIsSavedThoughItWasMarkedAfterThePeak) {
  AllocationLog log;
  log.allocate(address(1), 10);
  log.allocate(address(2), 10);
  log.release(address(2), 10);
  log.mark_saved(address(1));
  EXPECT_EQ(at_peak(log), (std::multiset<std::tuple<int64_t, bool, bool>>{{10, true, true}, {10, false, false}}));
}

// The same as AllocationLog, with all the work done at every new peak.
class SimpleLog {
 public:
  void allocate(uintptr_t address, int64_t bytes) {
    live_[address] = {bytes, next_++};
    level_ += bytes;
    if (level_ > peak_) {
      peak_ = level_;
      at_peak_.clear();
      for (const auto& [where, block] : live_) {
        at_peak_[block.second] = block.first;
      }
    }
  }
  void release(uintptr_t address) {
    level_ -= live_.at(address).first;
    live_.erase(address);
  }
  void mark_saved(uintptr_t address) { saved_.insert(live_.at(address).second); }

  int64_t level() const { return level_; }
  int64_t peak() const { return peak_; }
  std::multiset<std::tuple<int64_t, bool, bool>> blocks_at_peak() const {
    std::set<int64_t> alive;
    for (const auto& [where, block] : live_) {
      alive.insert(block.second);
    }
    std::multiset<std::tuple<int64_t, bool, bool>> result;
    for (const auto& [id, bytes] : at_peak_) {
      result.emplace(bytes, saved_.contains(id), alive.contains(id));
    }
    return result;
  }
  const std::map<uintptr_t, std::pair<int64_t, int64_t>>& live() const { return live_; }

 private:
  std::map<uintptr_t, std::pair<int64_t, int64_t>> live_;  // address: bytes, id
  std::map<int64_t, int64_t> at_peak_;                     // id: bytes
  std::set<int64_t> saved_;
  int64_t next_ = 0;
  int64_t level_ = 0;
  int64_t peak_ = 0;
};

// Random traffic among 40 addresses. `largest` bounds the size of a block, so a later call can be kept below or sent
// above the peak of an earlier one.
void run(AllocationLog& log, SimpleLog& simple, std::mt19937& random, int events, int64_t largest) {
  for (int i = 0; i < events; ++i) {
    const uintptr_t where = 1 + random() % 40;
    if (simple.live().contains(where)) {
      if (random() % 8 == 0) {
        log.mark_saved(address(where));
        simple.mark_saved(where);
        continue;
      }
      log.release(address(where), simple.live().at(where).first);
      simple.release(where);
    } else {
      const auto bytes = static_cast<int64_t>(1 + random() % static_cast<uint64_t>(largest));
      log.allocate(address(where), bytes);
      simple.allocate(where, bytes);
    }
  }
}

void expect_same(const AllocationLog& log, const SimpleLog& simple) {
  EXPECT_EQ(log.level(), simple.level());
  EXPECT_EQ(log.peak(), simple.peak());
  EXPECT_EQ(at_peak(log), simple.blocks_at_peak());
}

TEST(AllocationLog, AgreesWithASimpleLogOnRandomTraffic) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    AllocationLog log;
    SimpleLog simple;
    for (int round = 0; round < 20; ++round) {
      run(log, simple, random, 100, 1000);
      expect_same(log, simple);
    }
  }
}

// Past 2^20 events the log folds its history. The peak may lie before the fold, after it, or before two of them.
TEST(AllocationLog, LivesForMillionsOfEvents) {
  constexpr int kMoreThanOneFold = (1 << 20) + (1 << 18);
  std::mt19937 random(7);
  AllocationLog log;
  SimpleLog simple;
  run(log, simple, random, 1000, 1000);
  run(log, simple, random, 2 * kMoreThanOneFold, 20);  // the peak stays where it was, two folds ago
  expect_same(log, simple);
  const int64_t old_peak = log.peak();
  run(log, simple, random, 1000, 2000);  // a higher one, with blocks alive from before the fold
  expect_same(log, simple);
  ASSERT_GT(log.peak(), old_peak);
  run(log, simple, random, kMoreThanOneFold, 20);
  expect_same(log, simple);
}

}  // namespace
}  // namespace snug::detail::allocation_log_test
