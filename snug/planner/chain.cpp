#include "snug/planner/chain.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/planner/detail/at.h"

// Rotor's recurrence (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous chains",
// RR-9302), with several options a block as in Rockmate (Zhao et al., ICML 2023). V(s, t) is the least time for forward and
// backward of blocks s..t as a function of the bytes m above the input of s; the gradient of t's output is among them, unless
// t is the last block of all.
//
//   save with option o: V(s, t)(m) = seconds_o + V(s+1, t)(m - saved_o)      if m >= gradient_t + forward_peak_o, left_{s+1..t} + backward_peak_o
//   cut before j:       V(s, t)(m) = forward(s..j-1) + V(j, t)(m - output_{j-1}) + V(s, j-1)(m - left_{j..t})
//                                                                            if m >= gradient_t + transit peak of s..j-1
//
// left: the gradients of parameters that these blocks' backward passes left behind, an addition of ours.
//
// It is optimal among schedules where what is stored stays until its backward. Published programs tabulate V over about 500
// slots of memory and round each size up to one; here V is kept as the step function that it is, so bytes are exact and one
// solution answers all budgets. Equal sub-chains share their function: a model of N equal layers has O(N) of them, not O(N^2).

namespace snug::plan {
namespace {

using detail::at;

}  // namespace

ChainSolver::ChainSolver(std::vector<ChainBlock> blocks) : blocks_(std::move(blocks)) {
  const int count = static_cast<int>(blocks_.size());
  if (count == 0) {
    throw ConfigError("ChainSolver: there are 0 blocks; give at least one");
  }
  std::map<ChainBlock, int> kinds;
  std::vector<int> kind;
  for (const ChainBlock& block : blocks_) {
    if (block.options.empty()) {
      throw ConfigError(fmt::format("ChainSolver: block {} has 0 options; give at least one", kind.size()));
    }
    kind.push_back(kinds.emplace(block, static_cast<int>(kinds.size())).first->second);
  }
  table_of_.assign(at(count * count), -1);
  std::map<std::vector<int>, int> known;
  for (int length = 1; length <= count; ++length) {
    for (int first = 0; first + length <= count; ++first) {
      const int last = first + length - 1;
      std::vector<int> signature(kind.begin() + first, kind.begin() + last + 1);
      signature.push_back(last == count - 1 ? 1 : 0);
      const auto [found, is_new] = known.emplace(std::move(signature), static_cast<int>(tables_.size()));
      if (is_new) {
        tables_.push_back(solve(first, last));
      }
      table_of_[at(first * count + last)] = found->second;
    }
  }
}

const ChainSolver::Steps& ChainSolver::steps(int first, int last) const {
  return tables_[at(table_of_[at(first * static_cast<int>(blocks_.size()) + last)])];
}

int64_t ChainSolver::gradient(int last) const { return at(last) + 1 < blocks_.size() ? blocks_[at(last)].output : 0; }

int64_t ChainSolver::left(int first, int last) const {
  int64_t sum = 0;
  for (int i = first; i <= last; ++i) {
    sum += blocks_[at(i)].left;
  }
  return sum;
}

ChainSolver::Steps ChainSolver::solve(int first, int last) const {
  Steps all;
  const ChainBlock& block = blocks_[at(first)];
  for (size_t o = 0; o < block.options.size(); ++o) {
    const ChainOption& option = block.options[o];
    const int64_t least = std::max(gradient(last) + option.forward_peak, left(first + 1, last) + option.backward_peak);
    if (first == last) {
      all.push_back({least, option.seconds, true, static_cast<int>(o)});
      continue;
    }
    for (const Step& rest : steps(first + 1, last)) {
      all.push_back(
          {std::max(least, rest.bytes + option.saved), option.seconds + rest.seconds, true, static_cast<int>(o)});
    }
  }
  double forward = 0;
  int64_t transit = 0;
  int64_t before = 0;  // output of the block before, where that is not the input of all
  for (int j = first + 1; j <= last; ++j) {
    const ChainBlock& passed = blocks_[at(j - 1)];
    forward += passed.forward_seconds;
    transit = std::max(transit, gradient(last) + before + passed.transit_peak);
    before = passed.output;
    // Both parts use the same bytes one after the other: the sum of two step functions at equal m.
    const Steps& rest = steps(j, last);
    const Steps& again = steps(first, j - 1);
    const int64_t gone = left(j, last);
    size_t a = 0;
    size_t b = 0;
    while (a < rest.size() && b < again.size()) {
      const int64_t bytes = std::max({transit, rest[a].bytes + passed.output, again[b].bytes + gone});
      while (a + 1 < rest.size() && rest[a + 1].bytes + passed.output <= bytes) {
        ++a;
      }
      while (b + 1 < again.size() && again[b + 1].bytes + gone <= bytes) {
        ++b;
      }
      all.push_back({bytes, forward + rest[a].seconds + again[b].seconds, false, j - first});
      const bool a_next = a + 1 < rest.size() &&
                          (b + 1 == again.size() || rest[a + 1].bytes + passed.output <= again[b + 1].bytes + gone);
      if (!a_next && b + 1 == again.size()) {
        break;
      }
      ++(a_next ? a : b);
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Step& a, const Step& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.seconds < b.seconds;
  });
  Steps front;
  for (const Step& step : all) {
    if (front.empty() || step.seconds < front.back().seconds) {
      front.push_back(step);
    }
  }
  return front;
}

std::vector<ChainPoint> ChainSolver::curve() const {
  std::vector<ChainPoint> points;
  for (const Step& step : steps(0, static_cast<int>(blocks_.size()) - 1)) {
    points.push_back({step.bytes, step.seconds});
  }
  return points;
}

std::vector<ChainAction> ChainSolver::schedule(int64_t budget) const {
  std::vector<ChainAction> actions;
  expand(0, static_cast<int>(blocks_.size()) - 1, budget, actions);
  return actions;
}

void ChainSolver::expand(int first, int last, int64_t budget, std::vector<ChainAction>& actions) const {
  const Steps& front = steps(first, last);
  const auto after = std::upper_bound(front.begin(), front.end(), budget,
                                      [](int64_t bytes, const Step& step) { return bytes < step.bytes; });
  if (after == front.begin()) {
    return;
  }
  const Step& step = *std::prev(after);
  if (step.save) {
    actions.push_back({true, first, last, step.choice, 0});
    if (first < last) {
      expand(first + 1, last, step.bytes - blocks_[at(first)].options[at(step.choice)].saved, actions);
    }
    return;
  }
  const int cut = first + step.choice;
  actions.push_back({false, first, last, 0, cut});
  expand(cut, last, step.bytes - blocks_[at(cut - 1)].output, actions);
  expand(first, cut - 1, step.bytes - left(cut, last), actions);
}

int64_t ChainSolver::intervals() const { return static_cast<int64_t>(tables_.size()); }

}  // namespace snug::plan
