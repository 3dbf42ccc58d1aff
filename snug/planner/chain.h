#pragma once
// The fastest way through a chain of blocks for every memory budget at once, by dynamic programming over exact bytes.

#include <cstdint>
#include <string>
#include <vector>

namespace snug::plan {

/// One way to run a block's forward and backward pass.
struct ChainOption {
  double seconds = 0;         ///< forward that saves, and backward
  int64_t saved = 0;          ///< bytes that stay between the two, the block's output included
  int64_t forward_peak = 0;   ///< highest in the forward pass above the block's input
  int64_t backward_peak = 0;  ///< highest in the backward pass above the block's input, `saved` and gradients included

  friend auto operator<=>(const ChainOption&, const ChainOption&) = default;
};

struct ChainBlock {
  double forward_seconds = 0;  ///< of a forward that saves nothing
  int64_t output = 0;          ///< bytes
  int64_t transit_peak = 0;    ///< highest in that forward above the block's input, its output included
  int64_t left = 0;            ///< what its backward pass leaves for good: gradients of parameters
  std::vector<ChainOption> options = {};

  friend auto operator<=>(const ChainBlock&, const ChainBlock&) = default;
};

/// What a schedule does next with blocks first..last. Save: run `first` with `option`, then the rest, then its backward. Cut:
/// run first..at-1 without saving, do at..last, then first..at-1 again from the input.
struct ChainAction {
  bool save = true;
  int first = 0;
  int last = 0;
  int option = 0;  ///< of Save
  int at = 0;      ///< of Cut

  friend bool operator==(const ChainAction&, const ChainAction&) = default;
};

struct ChainPoint {
  int64_t bytes = 0;  ///< the least budget for it, above the chain's input
  double seconds = 0;
};

class ChainSolver {
 public:
  /// Throws ConfigError for an empty chain and for a block without options.
  explicit ChainSolver(std::vector<ChainBlock> blocks);

  /// Bytes ascending, seconds descending.
  std::vector<ChainPoint> curve() const;

  /// In the order in which they are decided, from the outside in; empty if nothing fits.
  std::vector<ChainAction> schedule(int64_t budget) const;

  /// Distinct sub-chains that were solved; equal blocks share them.
  int64_t intervals() const;

 private:
  struct Step {
    int64_t bytes;
    double seconds;
    bool save;
    int choice;  // option, or the number of blocks before the cut
  };
  using Steps = std::vector<Step>;  // bytes ascending, seconds descending

  const Steps& steps(int first, int last) const;
  int64_t gradient(int last) const;
  int64_t left(int first, int last) const;
  Steps solve(int first, int last) const;
  void expand(int first, int last, int64_t budget, std::vector<ChainAction>& actions) const;

  std::vector<ChainBlock> blocks_;
  std::vector<int> table_of_;  // [first * blocks + last]
  std::vector<Steps> tables_;
};

}  // namespace snug::plan

namespace snug {  // their names of before, for one release

using plan::ChainAction;
using plan::ChainBlock;
using plan::ChainOption;
using plan::ChainPoint;
using plan::ChainSolver;

}  // namespace snug
