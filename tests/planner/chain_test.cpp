// The dynamic program against all schedules of short chains, walked one by one with real bytes.

#include "snug/planner/chain.h"

#include <algorithm>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "snug/core/error.h"

namespace snug::chain_test {
namespace {

size_t at(int index) { return static_cast<size_t>(index); }

std::vector<ChainBlock> random_chain(uint32_t seed, int length) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<ChainBlock> blocks;
  for (int i = 0; i < length; ++i) {
    if (i > 0 && below(3) == 0) {
      blocks.push_back(blocks.back());
      continue;
    }
    ChainBlock block{1.0 + below(9), 4 + below(12), 0, below(6), {}};
    block.transit_peak = block.output + below(6);
    const int options = 1 + below(3);
    for (int o = 0; o < options; ++o) {
      const int64_t saved = block.output + below(20);
      block.options.push_back(
          {3 * block.forward_seconds + below(3), saved, saved + below(6), saved + block.output + below(8)});
    }
    blocks.push_back(std::move(block));
  }
  return blocks;
}

struct Cost {
  int64_t peak;
  double seconds;
};

// Every schedule's peak above the chain's input and its time: bytes are added up as they are taken, no budget is handed down.
std::vector<Cost> all_schedules(const std::vector<ChainBlock>& blocks, int first, int last) {
  const int64_t gradient = at(last) + 1 < blocks.size() ? blocks[at(last)].output : 0;
  // Gradients of parameters that the blocks from `begin` on have left.
  const auto left = [&](int begin) {
    int64_t sum = 0;
    for (int k = begin; k <= last; ++k) {
      sum += blocks[at(k)].left;
    }
    return sum;
  };
  std::vector<Cost> costs;
  for (const ChainOption& option : blocks[at(first)].options) {
    const int64_t own = std::max(gradient + option.forward_peak, left(first + 1) + option.backward_peak);
    if (first == last) {
      costs.push_back({own, option.seconds});
      continue;
    }
    for (const Cost& rest : all_schedules(blocks, first + 1, last)) {
      costs.push_back({std::max(own, option.saved + rest.peak), option.seconds + rest.seconds});
    }
  }
  for (int cut = first + 1; cut <= last; ++cut) {
    int64_t peak = 0;
    double forward = 0;
    for (int k = first; k < cut; ++k) {
      peak = std::max(peak, gradient + (k > first ? blocks[at(k - 1)].output : 0) + blocks[at(k)].transit_peak);
      forward += blocks[at(k)].forward_seconds;
    }
    const std::vector<Cost> again = all_schedules(blocks, first, cut - 1);
    for (const Cost& rest : all_schedules(blocks, cut, last)) {
      for (const Cost& before : again) {
        costs.push_back({std::max({peak, blocks[at(cut - 1)].output + rest.peak, left(cut) + before.peak}),
                         forward + rest.seconds + before.seconds});
      }
    }
    // Only the best of equal peak matters for what is built on it.
    std::sort(costs.begin(), costs.end(),
              [](const Cost& a, const Cost& b) { return std::pair(a.peak, a.seconds) < std::pair(b.peak, b.seconds); });
    costs.erase(std::unique(costs.begin(), costs.end(), [](const Cost& a, const Cost& b) { return a.peak == b.peak; }),
                costs.end());
  }
  return costs;
}

TEST(ChainSolver, EqualsAllSchedulesOfUpToSixBlocksForEveryBudget) {
  for (uint32_t seed = 0; seed < 120; ++seed) {
    const std::vector<ChainBlock> blocks = random_chain(seed, 1 + static_cast<int>(seed % 6));
    const std::vector<ChainPoint> curve = ChainSolver(blocks).curve();
    const std::vector<Cost> all = all_schedules(blocks, 0, static_cast<int>(blocks.size()) - 1);
    for (int64_t budget = 0; budget < 260; ++budget) {
      double best = std::numeric_limits<double>::infinity();
      for (const Cost& cost : all) {
        best = cost.peak <= budget ? std::min(best, cost.seconds) : best;
      }
      double found = std::numeric_limits<double>::infinity();
      for (const ChainPoint& point : curve) {
        found = point.bytes <= budget ? point.seconds : found;
      }
      ASSERT_DOUBLE_EQ(found, best) << "seed " << seed << ", budget " << budget;
    }
  }
}

// A schedule as the executor sees it: which actions in which order, with the bytes held at each.
class Walk {
 public:
  Walk(const std::vector<ChainBlock>& blocks, const std::vector<ChainAction>& actions)
      : blocks_(blocks), actions_(actions) {
    part(0);
  }
  int64_t peak = 0;
  double seconds = 0;

 private:
  void part(int64_t held) {
    ASSERT_LT(next_, actions_.size());
    const ChainAction action = actions_[next_++];
    const int64_t gradient = at(action.last) + 1 < blocks_.size() ? blocks_[at(action.last)].output : 0;
    const ChainBlock& block = blocks_[at(action.first)];
    if (action.save) {
      const ChainOption& option = block.options[at(action.option)];
      peak = std::max({peak, held + gradient + option.forward_peak,
                       held + left(action.first + 1, action.last) + option.backward_peak});
      seconds += option.seconds;
      if (action.first < action.last) {
        part(held + option.saved);
      }
      return;
    }
    for (int k = action.first; k < action.at; ++k) {
      const int64_t input = k > action.first ? blocks_[at(k - 1)].output : 0;
      peak = std::max(peak, held + gradient + input + blocks_[at(k)].transit_peak);
      seconds += blocks_[at(k)].forward_seconds;
    }
    part(held + blocks_[at(action.at - 1)].output);
    part(held + left(action.at, action.last));
  }

  int64_t left(int first, int last) const {
    int64_t sum = 0;
    for (int k = first; k <= last; ++k) {
      sum += blocks_[at(k)].left;
    }
    return sum;
  }

  const std::vector<ChainBlock>& blocks_;
  const std::vector<ChainAction>& actions_;
  size_t next_ = 0;
};

TEST(ChainSolver, GivesASchedulePerPointThatNeedsExactlyItsBytesAndSeconds) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const std::vector<ChainBlock> blocks = random_chain(seed, 9);
    const ChainSolver solver(blocks);
    for (const ChainPoint& point : solver.curve()) {
      const std::vector<ChainAction> actions = solver.schedule(point.bytes);
      const Walk walk(blocks, actions);
      ASSERT_EQ(walk.peak, point.bytes) << "seed " << seed;
      ASSERT_NEAR(walk.seconds, point.seconds, 1e-9) << "seed " << seed;
    }
    ASSERT_TRUE(solver.schedule(solver.curve().front().bytes - 1).empty());
  }
}

TEST(ChainSolver, SolvesEqualSubChainsOnce) {
  const ChainBlock block = random_chain(7, 1)[0];
  const ChainSolver solver(std::vector<ChainBlock>(48, block));
  EXPECT_EQ(solver.intervals(),
            2 * 48 - 1);  // one per length, inside and at the end, where no gradient comes from above
  EXPECT_GT(solver.curve().size(), 10U);
}

TEST(ChainSolver, RefusesABlockThatCannotRun) {
  EXPECT_THROW(ChainSolver({}), ConfigError);
  EXPECT_THROW(ChainSolver({ChainBlock{1, 1, 1, 0, {}}}), ConfigError);
}

}  // namespace
}  // namespace snug::chain_test
