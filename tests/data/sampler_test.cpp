#include "snug/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::sampler_test {
namespace {

using Indices = std::vector<int64_t>;

TEST(Sampler, VisitsEveryIndexExactlyOncePerEpoch) {
  for (const int64_t size : {1, 2, 3, 5, 16, 17, 1000, 4096, 30011}) {
    Sampler sampler(size, 42);
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      Indices indices = sampler.next(size);
      std::sort(indices.begin(), indices.end());
      for (int64_t i = 0; i < size; ++i) {
        ASSERT_EQ(indices[static_cast<size_t>(i)], i) << "size " << size << ", epoch " << epoch;
      }
    }
  }
}

TEST(Sampler, DrawsOverTheEndOfAnEpochIntoTheNext) {
  Sampler in_one(10, 3);
  Sampler in_parts(10, 3);
  const Indices all = in_one.next(35);
  Indices parts;
  for (const int64_t count : {7, 0, 7, 1, 20}) {
    const Indices drawn = in_parts.next(count);
    ASSERT_EQ(static_cast<int64_t>(drawn.size()), count);
    parts.insert(parts.end(), drawn.begin(), drawn.end());
  }
  EXPECT_EQ(parts, all);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(std::set<int64_t>(all.begin() + epoch * 10, all.begin() + (epoch + 1) * 10).size(), 10u);
  }
}

TEST(Sampler, RanksTogetherDrawWhatOneDraws) {
  for (const int64_t ranks : {1, 2, 3, 7}) {
    Sampler alone(10, 3);
    std::vector<Sampler> samplers(static_cast<size_t>(ranks), Sampler(10, 3));
    for (const int64_t count : {6, 5, 0, 13, 2}) {  // some have none of the last
      Indices together;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const Indices own = samplers[static_cast<size_t>(rank)].next(count, rank, ranks);
        EXPECT_LE(own.size(), static_cast<size_t>((count + ranks - 1) / ranks));
        EXPECT_GE(own.size(), static_cast<size_t>(count / ranks));
        together.insert(together.end(), own.begin(), own.end());
      }
      EXPECT_EQ(together, alone.next(count)) << count << " by " << ranks;
    }
  }
  EXPECT_THROW(Sampler(10, 3).next(4, 2, 2), ConfigError);
}

TEST(Sampler, CountsEpochsAndPositions) {
  Sampler sampler(10, 0);
  EXPECT_EQ(sampler.epoch(), 0);
  EXPECT_EQ(sampler.position(), 0);
  sampler.next(9);
  EXPECT_EQ(sampler.epoch(), 0);
  EXPECT_EQ(sampler.position(), 9);
  sampler.next(1);
  EXPECT_EQ(sampler.epoch(), 1);
  EXPECT_EQ(sampler.position(), 0);
  sampler.next(25);
  EXPECT_EQ(sampler.epoch(), 3);
  EXPECT_EQ(sampler.position(), 5);
}

TEST(Sampler, ResumesExactlyFromSeedEpochAndPosition) {
  Sampler sampler(97, 11);
  for (int64_t drawn = 0; drawn < 97 * 3; drawn += 13) {
    Sampler resumed(97, 11);
    resumed.next(5);  // has been used for something else before
    resumed.seek(sampler.epoch(), sampler.position());
    Sampler copy = sampler;
    EXPECT_EQ(resumed.next(200), copy.next(200)) << "after " << drawn;
    sampler.next(13);
  }
}

TEST(Sampler, GivesTheSameOrderOnEveryPlatform) {
  // Written down from the definition in sampler.cpp by an independent program in Python.
  Sampler sampler(10, 7);
  EXPECT_EQ(sampler.next(20), (Indices{9, 5, 0, 6, 8, 7, 2, 1, 3, 4, 6, 2, 7, 4, 9, 1, 3, 8, 5, 0}));
  Sampler large(std::numeric_limits<int64_t>::max(), 12345678901234567890u);
  large.seek(1000, 999);
  EXPECT_EQ(large.next(3), (Indices{4469375011953020763, 5432927417193517448, 1719731108938800475}));
}

TEST(Sampler, OrdersDifferentlyForEverySeedAndEveryEpoch) {
  std::set<Indices> orders;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Sampler sampler(50, seed);
    for (int epoch = 0; epoch < 10; ++epoch) {
      orders.insert(sampler.next(50));
    }
  }
  EXPECT_EQ(orders.size(), 100u);
}

// Chi-square of `counts` against equal shares, as standard deviations above its mean (normal approximation).
double deviations_from_uniform(const std::map<Indices, int64_t>& counts, double cells) {
  double draws = 0;
  for (const auto& [indices, count] : counts) {
    draws += static_cast<double>(count);
  }
  const double expected = draws / cells;
  double chi_square = (cells - static_cast<double>(counts.size())) * expected;  // the empty cells
  for (const auto& [indices, count] : counts) {
    chi_square += std::pow(static_cast<double>(count) - expected, 2) / expected;
  }
  return (chi_square - (cells - 1)) / std::sqrt(2 * (cells - 1));
}

TEST(Sampler, ShowsEveryOrderOfASmallSetEquallyOften) {
  double factorial = 1;
  for (int64_t size = 2; size <= 6; ++size) {
    factorial *= static_cast<double>(size);
    std::map<Indices, int64_t> counts;
    Sampler sampler(size, 1);
    for (int epoch = 0; epoch < 30'000; ++epoch) {
      ++counts[sampler.next(size)];
    }
    EXPECT_LT(deviations_from_uniform(counts, factorial), 5) << "size " << size;
  }
}

TEST(Sampler, SpreadsPairsOfNeighboursEvenlyOverALargeSet) {
  // Where do consecutive draws lie? 16 x 16 cells over a set that is no power of two.
  constexpr int64_t kSize = 1'000'003;
  std::map<Indices, int64_t> counts;
  Sampler sampler(kSize, 9);
  const Indices drawn = sampler.next(100'000);
  for (size_t i = 0; i + 1 < drawn.size(); ++i) {
    ++counts[{drawn[i] * 16 / kSize, drawn[i + 1] * 16 / kSize}];
  }
  EXPECT_LT(deviations_from_uniform(counts, 256), 5);
}

TEST(Sampler, LeavesNoTraceOfTheOrderOfNeighbouringSeedsAndEpochs) {
  // How often the same place holds the same index in two orders: one in `size` on average.
  constexpr int64_t kSize = 100;
  int64_t same_epoch = 0;
  int64_t same_seed = 0;
  constexpr int kTrials = 500;
  for (uint64_t seed = 0; seed < kTrials; ++seed) {
    Sampler sampler(kSize, seed);
    Sampler next_seed(kSize, seed + 1);
    const Indices first = sampler.next(kSize);
    const Indices second = sampler.next(kSize);
    const Indices other = next_seed.next(kSize);
    for (size_t i = 0; i < first.size(); ++i) {
      same_epoch += first[i] == second[i];
      same_seed += first[i] == other[i];
    }
  }
  EXPECT_NEAR(static_cast<double>(same_epoch), kTrials, 5 * std::sqrt(kTrials));
  EXPECT_NEAR(static_cast<double>(same_seed), kTrials, 5 * std::sqrt(kTrials));
}

TEST(Sampler, RejectsEmptyDataNegativeCountsAndPositionsOutside) {
  EXPECT_THROW(Sampler(0, 1), ConfigError);
  EXPECT_THROW(Sampler(-5, 1), ConfigError);
  Sampler sampler(10, 1);
  EXPECT_THROW(sampler.next(-1), ConfigError);
  EXPECT_THROW(sampler.seek(-1, 0), ConfigError);
  EXPECT_THROW(sampler.seek(0, -1), ConfigError);
  EXPECT_THROW(sampler.seek(0, 10), ConfigError);
  sampler.seek(0, 9);
  EXPECT_EQ(sampler.position(), 9);
}

}  // namespace
}  // namespace snug::sampler_test
