#include "snug/planner/chain_plans.h"

#include <algorithm>
#include <utility>

#include "snug/planner/chain.h"
#include "snug/planner/detail/at.h"
#include "snug/planner/detail/chain_blocks.h"

// Blocks first..last of a Cut run once without saving, and again when the backward pass comes to `last`: so what they save
// is held from the first Unpack of that block's backward pass on, and what a block itself rebuilds, from that of its own. What random
// operators made stays in every plan.

namespace snug::plan {
namespace {

constexpr size_t kMostPlans = 512;

using detail::at;

// `from`: Stay::from the event in which these blocks run, Stay::kept() for the forward pass itself.
void write(const detail::CutChain& chain, const std::vector<ChainAction>& actions, size_t& next, Stay from,
           Stays& plan) {
  const ChainAction action = actions[next++];
  const auto hold = [&](int s, Stay stay) { plan[at(s)] = std::min(plan[at(s)], stay); };
  if (!action.save) {
    const detail::CutBlock& before = chain.blocks[at(action.at - 1)];
    for (const int s : before.outputs) {
      hold(s, from);
    }
    write(chain, actions, next, from, plan);
    write(chain, actions, next, Stay::from(before.begin), plan);
    return;
  }
  const detail::CutBlock& block = chain.blocks[at(action.first)];
  const std::vector<int>& dropped = block.drops[at(action.option)];
  const auto is_among = [](const std::vector<int>& storages, int s) {
    return std::find(storages.begin(), storages.end(), s) != storages.end();
  };
  for (const int s : block.made) {
    if (chain.saved[at(s)] || (is_among(block.outputs, s) && action.first < action.last)) {
      hold(s, is_among(dropped, s) ? std::max(from, Stay::from(block.begin)) : from);
    }
  }
  if (action.first < action.last) {
    write(chain, actions, next, from, plan);
  }
}

std::vector<Stays> plans_of(const detail::CutChain& chain) {
  std::vector<ChainBlock> costs;
  for (const detail::CutBlock& block : chain.blocks) {
    costs.push_back(block.costs);
  }
  const ChainSolver solver(std::move(costs));
  const std::vector<ChainPoint> curve = solver.curve();
  const size_t count = std::min(kMostPlans, curve.size());
  std::vector<Stays> plans;
  for (size_t i = 0; i < count; ++i) {
    Stays plan(chain.saved.size(), Stay::never());
    for (size_t s = 0; s < plan.size(); ++s) {
      plan[s] = chain.pinned[s] ? Stay::kept() : Stay::never();
    }
    size_t next = 0;
    write(chain, solver.schedule(curve[i * curve.size() / count].bytes), next, Stay::kept(), plan);
    plans.push_back(std::move(plan));
  }
  return plans;
}

}  // namespace

std::vector<std::vector<Stays>> chain_plans(const StepSimulator& simulator) {
  std::vector<std::vector<Stays>> result;
  size_t before = 2;
  for (const size_t crossing : {1, 2, 4, 8}) {
    const detail::CutChain chain = detail::cut_into_blocks(simulator, crossing);
    if (chain.cuts > before) {
      result.push_back(plans_of(chain));
      before = chain.cuts;
    }
  }
  return result;
}

}  // namespace snug::plan
