#pragma once
// A profile cut into a chain of blocks, with what each block needs in each of several ways to run it. Internal to planner.

#include <cstddef>
#include <vector>

#include "snug/planner/chain.h"
#include "snug/planner/simulator.h"

namespace snug::detail {

struct CutBlock {
  int first = 0;  ///< operators, both included
  int last = 0;
  std::vector<int> outputs = {};             ///< storages that later blocks read; none of the last block
  int begin = 0;                             ///< event in which its backward pass begins
  std::vector<int> made = {};                ///< storages
  std::vector<std::vector<int>> drops = {};  ///< per option: what is saved in plain training and rebuilt here
  ChainBlock costs = {};                     ///< estimates
};

struct CutChain {
  std::vector<CutBlock> blocks = {};
  size_t cuts = 0;                ///< blocks before any were merged
  std::vector<bool> saved = {};   ///< per storage: asked for by the backward pass
  std::vector<bool> pinned = {};  ///< per storage: made by what cannot run again
};

/// `crossing`: the most storages that a cut may cross.
CutChain cut_into_blocks(const StepSimulator& simulator, size_t crossing);

}  // namespace snug::detail
