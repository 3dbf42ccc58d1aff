#pragma once
// Plans for models that are chains of blocks: what the dynamic program of chain.h says, put into the words of the simulator.

#include <vector>

#include "snug/planner/simulator.h"

namespace snug::plan {

/// One list for each way to cut the chain. In a list at most 512 plans from the most frugal to plain training, rebuilt over several levels
/// where the chain is deep. They are made from estimates of what blocks need, so the one to take is to be found with the simulator. Empty
/// where forward is no chain of at least 3 blocks.
std::vector<std::vector<Stays>> chain_plans(const StepSimulator& simulator);

}  // namespace snug::plan

namespace snug {  // their names of before, for one release

using plan::chain_plans;

}  // namespace snug
