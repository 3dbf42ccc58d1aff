#include "snug/planner/detail/chain_blocks.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "snug/planner/detail/at.h"

// A block ends where only one storage made so far is still read by later operators, or at most a few: there a forward pass can be taken
// up again with nothing but those. Few blocks have better estimates, many can do with fewer bytes. Blocks of the same operators and bytes
// get the same (mean) times, so that the dynamic program sees that they are equal although they were measured. An option of a block
// drops what is cheapest to rebuild for its bytes; the next one drops one storage more.

namespace snug::detail {
namespace {

constexpr int kMostBlocks = 100;
constexpr int kMostUnequalBlocks = 40;  // the dynamic program is cubic in these
constexpr int kMostOptions = 7;

class Cutter {
 public:
  // `crossing`: the most storages that a cut may cross.
  Cutter(const StepSimulator& simulator, size_t crossing)
      : simulator_(simulator),
        profile_(simulator.profile()),
        saved_(profile_.saved_storages()),
        pinned_(profile_.storages.size(), false),
        last_reader_(profile_.storages.size(), -1),
        maker_(profile_.storages.size(), -1),
        plain_(simulator.run(keep_all(profile_))),
        unit_(std::max<int64_t>(1, plain_.peak_bytes / 512)) {
    for (int i = 0; i < static_cast<int>(profile_.operators.size()); ++i) {
      for (const ValueId& value : simulator_.needs(i)) {
        last_reader_[at(value.storage)] = i;
      }
      for (const ValueId& value : profile_.operators[at(i)].writes) {
        if (activation(value.storage)) {
          maker_[at(value.storage)] = value.version == 0 ? i : maker_[at(value.storage)];
          last_reader_[at(value.storage)] = std::max(last_reader_[at(value.storage)], i);
          pinned_[at(value.storage)] = pinned_[at(value.storage)] || !profile_.operators[at(i)].replayable ||
                                       profile_.storages[at(value.storage)].kind == StorageKind::Pinned;
        }
      }
    }
    find_blocks(crossing);
    cuts_ = blocks_.size();
    for (bool merged = true; merged;) {
      measure();
      merged = merge();
    }
  }

  CutChain chain() && { return {std::move(blocks_), cuts_, std::move(saved_), std::move(pinned_)}; }

 private:
  bool activation(int s) const { return profile_.storages[at(s)].kind != StorageKind::External; }
  int64_t bytes(int s) const { return profile_.storages[at(s)].bytes; }
  bool is_output(const CutBlock& block, int s) const {
    return std::find(block.outputs.begin(), block.outputs.end(), s) != block.outputs.end();
  }
  int64_t output_bytes(const CutBlock& block) const {
    int64_t sum = 0;
    for (const int s : block.outputs) {
      sum += bytes(s);
    }
    return sum;
  }
  int64_t rounded(int64_t count) const { return (count + unit_ - 1) / unit_ * unit_; }

  void find_blocks(size_t crossing) {
    const int operators = static_cast<int>(profile_.operators.size());
    std::vector<std::vector<int>> made(at(operators));
    std::vector<std::vector<int>> ends(at(operators));
    for (int s = 0; s < static_cast<int>(maker_.size()); ++s) {
      if (maker_[at(s)] >= 0) {
        made[at(maker_[at(s)])].push_back(s);
        ends[at(last_reader_[at(s)])].push_back(s);
      }
    }
    blocks_.clear();
    std::set<int> alive;
    std::vector<int> before;
    int first = 0;
    for (int i = 0; i < operators; ++i) {
      alive.insert(made[at(i)].begin(), made[at(i)].end());
      for (const int s : ends[at(i)]) {
        alive.erase(s);
      }
      const std::vector<int> outputs(alive.begin(), alive.end());
      if (!outputs.empty() && outputs.size() <= crossing && outputs != before && i + 1 < operators) {
        blocks_.push_back({first, i, outputs});
        before = outputs;
        first = i + 1;
      }
    }
    if (first < operators) {
      blocks_.push_back({first, operators - 1});
    }
  }

  // Half as many blocks, where there are too many.
  bool merge() {
    const int count = static_cast<int>(blocks_.size());
    if (count <= kMostUnequalBlocks || (count <= kMostBlocks && kinds_ <= 8)) {
      return false;
    }
    std::vector<CutBlock> fewer;
    for (int i = 0; i < count; i += 2) {
      const CutBlock& end = blocks_[at(std::min(i + 1, count - 1))];
      fewer.push_back({blocks_[at(i)].first, end.last, end.outputs});
    }
    blocks_ = std::move(fewer);
    return true;
  }

  void measure() {
    find_backward_begins();
    for (CutBlock& block : blocks_) {
      block.made.clear();
      block.drops.clear();
      block.costs = {};
    }
    std::vector<int> block_of(profile_.operators.size(), 0);
    for (int b = 0; b < static_cast<int>(blocks_.size()); ++b) {
      std::fill(block_of.begin() + blocks_[at(b)].first, block_of.begin() + blocks_[at(b)].last + 1, b);
    }
    for (int s = 0; s < static_cast<int>(maker_.size()); ++s) {
      if (maker_[at(s)] >= 0) {
        blocks_[at(block_of[at(maker_[at(s)])])].made.push_back(s);
      }
    }
    std::vector<double> backward;
    std::vector<int64_t> peaks;
    measure_backward(backward, peaks);
    for (size_t b = 0; b < blocks_.size(); ++b) {
      add_options(blocks_[b], backward[b], peaks[b]);
    }
    even_out();
  }

  // The first Unpack of what a block made, or of its input.
  void find_backward_begins() {
    std::vector<int> block_of(profile_.storages.size(), -1);
    for (int b = 0; b < static_cast<int>(blocks_.size()); ++b) {
      for (int i = blocks_[at(b)].first; i <= blocks_[at(b)].last; ++i) {
        for (const ValueId& value : profile_.operators[at(i)].writes) {
          block_of[at(value.storage)] = b;
        }
      }
    }
    constexpr int kNone = std::numeric_limits<int>::max();
    for (CutBlock& block : blocks_) {
      block.begin = kNone;
    }
    for (int e = 0; e < static_cast<int>(profile_.events.size()); ++e) {
      const ProfileEvent& event = profile_.events[at(e)];
      if (event.kind == EventKind::Unpack && activation(event.index) && block_of[at(event.index)] >= 0) {
        const int b = block_of[at(event.index)];
        const int user = is_output(blocks_[at(b)], event.index) ? b + 1 : b;
        blocks_[at(user)].begin = std::min(blocks_[at(user)].begin, e);
      }
    }
    int before = 0;
    for (size_t b = blocks_.size(); b-- > 0;) {
      blocks_[b].begin = blocks_[b].begin == kNone ? before : std::max(before, blocks_[b].begin);
      before = blocks_[b].begin;
    }
  }

  // Per block: seconds, bytes above the block's input without the gradients of parameters that later blocks left, and the gradients that
  // it leaves itself.
  void measure_backward(std::vector<double>& seconds, std::vector<int64_t>& peaks) {
    seconds.assign(blocks_.size(), 0);
    peaks.assign(blocks_.size(), 0);
    std::vector<int64_t> low(blocks_.size(), std::numeric_limits<int64_t>::max());
    size_t b = blocks_.size() - 1;
    int64_t own = 0;
    for (int e = 0; e < static_cast<int>(profile_.events.size()); ++e) {
      const ProfileEvent& event = profile_.events[at(e)];
      size_t next = b;
      while (next > 0 && blocks_[next - 1].begin <= blocks_[b].begin) {
        --next;  // it saved nothing
      }
      b = next > 0 && e >= blocks_[next - 1].begin ? next - 1 : b;
      own += event.kind == EventKind::Allocate ? event.bytes : event.kind == EventKind::Release ? -event.bytes : 0;
      if (e >= blocks_.back().begin) {
        seconds[b] += event.kind == EventKind::Backward ? profile_.backward[at(event.index)].seconds : 0;
        peaks[b] = std::max(peaks[b], plain_.high[at(e)]);
        low[b] = std::min(low[b], own);
      }
    }
    int64_t before = 0;
    int64_t left_after = 0;  // when the backward pass has gone through all but the blocks before
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const int64_t output = output_bytes(blocks_[i]);
      const bool ran = low[i] != std::numeric_limits<int64_t>::max();
      const int64_t left = ran ? std::max<int64_t>(0, low[i] - output) : left_after;
      peaks[i] = std::max<int64_t>(0, peaks[i] - before - left);
      blocks_[i].costs.left = i == 0 ? 0 : std::max<int64_t>(0, left_after - left);
      left_after = left;
      for (const int s : blocks_[i].made) {
        before += saved_[at(s)] || is_output(blocks_[i], s) ? bytes(s) : 0;
      }
    }
  }

  // Highest level of a forward pass through the block that keeps `kept`; the input is not counted.
  int64_t forward_peak(const CutBlock& block, const std::vector<bool>& kept) const {
    const size_t count = at(block.last - block.first) + 1;
    std::vector<int64_t> taken(count, 0), given_back(count, 0);  // by each operator
    for (const int s : block.made) {
      taken[at(maker_[at(s)] - block.first)] += bytes(s);
      if (last_reader_[at(s)] <= block.last && !kept[at(s)]) {
        given_back[at(last_reader_[at(s)] - block.first)] += bytes(s);
      }
    }
    int64_t level = 0;
    int64_t peak = 0;
    for (size_t i = 0; i < count; ++i) {
      level += taken[i];
      peak = std::max(peak, level + profile_.operators[at(block.first) + i].workspace);
      level -= given_back[i];
    }
    return peak;
  }

  // Seconds to rebuild `dropped` from what is kept and from before the block.
  double rebuild_seconds(const CutBlock& block, const std::vector<int>& dropped, const std::vector<bool>& kept) const {
    std::vector<bool> ran(at(block.last - block.first) + 1, false);
    std::vector<int> pending = dropped;
    double seconds = 0;
    while (!pending.empty()) {
      const int s = pending.back();
      pending.pop_back();
      for (int version = simulator_.last_version(s); version >= 0; --version) {
        const int op = simulator_.producer({s, version});
        if (op < block.first || op > block.last || ran[at(op - block.first)]) {
          continue;
        }
        ran[at(op - block.first)] = true;
        seconds += profile_.operators[at(op)].seconds;
        for (const ValueId& value : simulator_.needs(op)) {
          if (!kept[at(value.storage)] && !is_output(block, value.storage)) {
            pending.push_back(value.storage);
          }
        }
      }
    }
    return seconds;
  }

  void add_options(CutBlock& block, double backward, int64_t backward_peak) const {
    double forward = 0;
    for (int i = block.first; i <= block.last; ++i) {
      forward += profile_.operators[at(i)].seconds;
    }
    std::vector<bool> kept(saved_.size(), false);
    std::vector<std::pair<double, int>> ranked;
    int64_t saved = 0;
    for (const int s : block.made) {
      const bool is_kept = saved_[at(s)] && !is_output(block, s);
      kept[at(s)] = is_kept;
      saved += is_kept || is_output(block, s) ? bytes(s) : 0;
    }
    for (const int s : block.made) {
      if (kept[at(s)] && !pinned_[at(s)] && 64 * bytes(s) >= saved) {
        kept[at(s)] = false;
        ranked.emplace_back(rebuild_seconds(block, {s}, kept) / static_cast<double>(bytes(s)), s);
        kept[at(s)] = true;
      }
    }
    std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<int> dropped;
    const int all = static_cast<int>(ranked.size());
    for (int i = 0; i <= all; ++i) {
      if (i < kMostOptions || i == all) {
        block.drops.push_back(dropped);
        block.costs.options.push_back({forward + backward + rebuild_seconds(block, dropped, kept), rounded(saved),
                                       rounded(forward_peak(block, kept)), rounded(backward_peak)});
      }
      if (i < all) {
        const int s = ranked[at(i)].second;
        dropped.push_back(s);
        kept[at(s)] = false;
        saved -= bytes(s);
      }
    }
    block.costs.forward_seconds = forward;
    block.costs.output = rounded(output_bytes(block));
    block.costs.transit_peak = rounded(forward_peak(block, std::vector<bool>(saved_.size(), false)));
  }

  // Mean times for blocks that are equal but for these.
  void even_out() {
    std::map<std::string, std::vector<CutBlock*>> kinds;
    for (CutBlock& block : blocks_) {
      std::string key = std::to_string(block.drops.size());
      for (int i = block.first; i <= block.last; ++i) {
        key += ";" + profile_.operators[at(i)].name;
      }
      for (const int s : block.made) {
        key += "," + std::to_string(bytes(s));
      }
      kinds[key].push_back(&block);
    }
    kinds_ = kinds.size();
    for (auto& [key, equal] : kinds) {
      ChainBlock mean = equal[0]->costs;
      for (size_t i = 1; i < equal.size(); ++i) {
        mean.forward_seconds += equal[i]->costs.forward_seconds;
        mean.left += equal[i]->costs.left;
        for (size_t o = 0; o < mean.options.size(); ++o) {
          const ChainOption& other = equal[i]->costs.options[o];
          mean.options[o].seconds += other.seconds;
          mean.options[o].backward_peak = std::max(mean.options[o].backward_peak, other.backward_peak);
        }
      }
      mean.forward_seconds /= static_cast<double>(equal.size());
      mean.left /= std::ssize(equal);
      for (ChainOption& option : mean.options) {
        option.seconds /= static_cast<double>(equal.size());
      }
      for (CutBlock* block : equal) {
        block->costs = mean;
      }
    }
  }

  const StepSimulator& simulator_;
  const StepProfile& profile_;
  std::vector<bool> saved_;
  std::vector<bool> pinned_;      // made by what cannot run again
  std::vector<int> last_reader_;  // or writer, operators
  std::vector<int> maker_;
  Simulation plain_;
  int64_t unit_;  // bytes are rounded up to multiples of it: few distinct budgets, quick tables
  std::vector<CutBlock> blocks_;
  size_t kinds_ = 0;
  size_t cuts_ = 0;  // before any were merged
};

}  // namespace

CutChain cut_into_blocks(const StepSimulator& simulator, size_t crossing) {
  return simulator.profile().operators.empty() ? CutChain() : Cutter(simulator, crossing).chain();
}

}  // namespace snug::detail
