#include "src/planner/segment_costs.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "src/planner/at.h"

namespace snug::plan {
namespace {

constexpr int kMostOptions = 12;

class Costs {
 public:
  Costs(const Simulator& simulator, const StorageUses& uses, Segments& segments)
      : simulator_(simulator),
        profile_(simulator.profile()),
        uses_(uses),
        segments_(segments),
        plain_(simulator.run(keep_all(profile_))),
        storages_(static_cast<int>(profile_.storages.size())),
        operators_(static_cast<int>(profile_.operators.size())) {}

  void measure() {
    segments_.plain_peak = plain_.peak_bytes;
    find_needed();
    measure_bases();
    measure_backward();
    for (Segment& segment : segments_.list) {
      measure_forward(segment);
    }
  }

 private:
  int64_t bytes(int s) const { return profile_.storages[at(s)].bytes; }
  bool is_external(int s) const { return profile_.storages[at(s)].kind == StorageKind::External; }

  // Operators that run again if nothing droppable is kept.
  void find_needed() {
    is_needed_.assign(at(operators_), false);
    for (int i = operators_; i-- > 0;) {
      for (const Value& value : profile_.operators[at(i)].writes) {
        const bool is_saved = uses_.saved[at(value.storage)] && !is_external(value.storage);
        is_needed_[at(i)] = is_needed_[at(i)] || (is_saved && uses_.droppable[at(value.storage)]);
      }
      if (!is_needed_[at(i)]) {
        continue;
      }
      for (const Value& value : simulator_.needs(i)) {
        const int op = simulator_.producer(value);
        if (op >= 0 && uses_.droppable[at(value.storage)]) {
          is_needed_[at(op)] = true;
        }
      }
    }
  }

  // Levels of all storages that are not droppable, and of the backward pass's own bytes. In the forward pass also
  // levels of storages that the program still has, although no later segment reads them.
  void measure_bases() {
    const int events = static_cast<int>(profile_.events.size());
    std::vector<int64_t> level(at(events) + 1, 0);  // changes at first
    std::vector<int> event_of;
    for (int e = 0; e < events; ++e) {
      const Event& event = profile_.events[at(e)];
      if (event.kind == EventKind::Forward) {
        event_of.push_back(e);
      } else if (event.kind == EventKind::Allocate || event.kind == EventKind::Release) {
        level[at(e)] += event.kind == EventKind::Allocate ? event.bytes : -event.bytes;
      }
    }
    for (int s = 0; s < storages_; ++s) {
      const int dropped_at = uses_.dropped_at[at(s)];
      if (is_external(s) || uses_.first_writer[at(s)] == StorageUses::kNone) {
        continue;
      }
      if (!uses_.droppable[at(s)]) {
        level[at(event_of[at(uses_.first_writer[at(s)])])] += bytes(s);
        level[at(std::max(dropped_at, plain_.last_use[at(s)]))] -= bytes(s);
      } else if (!uses_.saved[at(s)]) {
        const int end = event_of[at(segment_with(uses_.last_user(s)).last)] + 1;
        level[at(std::min(end, dropped_at))] += bytes(s);
        level[at(dropped_at)] -= bytes(s);
      }
    }
    for (size_t e = 1; e < level.size(); ++e) {
      level[e] += level[e - 1];
    }
    for (Segment& segment : segments_.list) {
      segment.backward_base = level[at(segment.backward_begin)];
    }
    for (const int e : event_of) {
      base_.push_back(level[at(e)]);
    }
    for (const int dropped_at : uses_.dropped_at) {
      const auto after = std::upper_bound(event_of.begin(), event_of.end(), dropped_at);
      left_after_.push_back(static_cast<int>(after - event_of.begin()) - 1);
    }
  }

  const Segment& segment_with(int op) const {
    return *std::partition_point(segments_.list.begin(), segments_.list.end(),
                                 [&](const Segment& one) { return one.last < op; });
  }

  void measure_backward() {
    // Bytes of segments before k in plain training, when the backward pass of k begins.
    std::vector<int64_t> before(segments_.list.size() + 1, 0);
    for (int k = 0; k < segments_.count(); ++k) {
      before[at(k) + 1] = before[at(k)];
      for (const int s : segments_.list[at(k)].made) {
        before[at(k) + 1] += uses_.saved[at(s)] ? bytes(s) : 0;
      }
    }
    int end = static_cast<int>(profile_.events.size());
    for (int k = 0; k < segments_.count(); ++k) {
      Segment& segment = segments_.list[at(k)];
      const int begin = k + 1 == segments_.count() ? uses_.backward : segment.backward_begin;
      for (int e = begin; e < end; ++e) {
        segment.backward_peak = std::max(segment.backward_peak, plain_.high[at(e)] - before[at(k)]);
      }
      end = std::min(end, begin);
    }
  }

  enum class Pass { First, Again };

  // Highest level of a forward pass through the segment that keeps `kept`. In the first pass, a storage is in memory
  // until the program lets go of the storage.
  int64_t forward_peak(const Segment& segment, const std::vector<bool>& kept, Pass pass) const {
    const size_t count = at(segment.last - segment.first) + 1;
    std::vector<int64_t> taken(count, 0), given_back(count, 0);  // by each operator
    for (const int s : segment.made) {
      const int last = pass == Pass::First ? std::max(left_after_[at(s)], uses_.last_user(s)) : uses_.last_user(s);
      taken[at(std::max(uses_.first_writer[at(s)], segment.first) - segment.first)] += bytes(s);
      if (last <= segment.last && !kept[at(s)]) {
        given_back[at(last - segment.first)] += bytes(s);
      }
    }
    int64_t level = 0;
    int64_t peak = 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t op = at(segment.first) + i;
      level += taken[i];
      peak = std::max(peak, level + profile_.operators[op].workspace + (pass == Pass::First ? base_[op] : 0));
      level -= given_back[i];
    }
    return peak;
  }

  struct Rebuild {
    double seconds = 0;
    bool needs_unsaved_inputs = false;
  };

  // The rebuild of `dropped`, from kept storages and from storages of earlier segments.
  Rebuild rebuild(const Segment& segment, const std::vector<int>& dropped, const std::vector<bool>& kept) const {
    std::vector<bool> ran(at(segment.last - segment.first) + 1, false);
    std::vector<int> pending = dropped;
    Rebuild result;
    while (!pending.empty()) {
      const int s = pending.back();
      pending.pop_back();
      for (int version = simulator_.last_version(s); version >= 0; --version) {
        const int op = simulator_.producer({s, version});
        if (op < segment.first) {
          result.needs_unsaved_inputs = result.needs_unsaved_inputs || (op >= 0 && !uses_.saved[at(s)]);
          continue;
        }
        if (op > segment.last || ran[at(op - segment.first)]) {
          continue;
        }
        ran[at(op - segment.first)] = true;
        result.seconds += profile_.operators[at(op)].seconds;
        for (const Value& value : simulator_.needs(op)) {
          if (uses_.droppable[at(value.storage)] && !kept[at(value.storage)]) {
            pending.push_back(value.storage);
          }
        }
      }
    }
    return result;
  }

  // An option drops the saved storages with the cheapest rebuild for their bytes; each next option about as many more.
  void measure_forward(Segment& segment) const {
    for (int i = segment.first; i <= segment.last; ++i) {
      segment.seconds += is_needed_[at(i)] ? profile_.operators[at(i)].seconds : 0;
    }
    std::vector<bool> kept(at(storages_), false);
    segment.first_peak = forward_peak(segment, kept, Pass::First);
    segment.again_peak = forward_peak(segment, kept, Pass::Again);
    int64_t saved = 0;
    for (const int s : segment.made) {
      kept[at(s)] = uses_.saved[at(s)];
      saved += uses_.saved[at(s)] ? bytes(s) : 0;
    }
    std::vector<std::pair<double, int>> ranked;
    for (const int s : segment.made) {
      if (kept[at(s)] && 1024 * bytes(s) >= saved && bytes(s) > 0) {
        kept[at(s)] = false;
        ranked.emplace_back(rebuild(segment, {s}, kept).seconds / static_cast<double>(bytes(s)), s);
        kept[at(s)] = true;
      }
    }
    std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    SegmentOption option;
    for (int k = 0; k <= kMostOptions; ++k) {
      const size_t many = (at(k) * ranked.size() + at(kMostOptions - 1)) / at(kMostOptions);
      if (k > 0 && many == option.dropped.size()) {
        continue;
      }
      while (option.dropped.size() < many) {
        const int s = ranked[option.dropped.size()].second;
        option.dropped.push_back(s);
        kept[at(s)] = false;
      }
      option.kept.clear();
      std::copy_if(segment.made.begin(), segment.made.end(), std::back_inserter(option.kept),
                   [&](int s) { return kept[at(s)]; });
      const Rebuild again = rebuild(segment, option.dropped, kept);
      option.seconds = again.seconds;
      option.needs_unsaved_inputs = again.needs_unsaved_inputs;
      option.first_peak = forward_peak(segment, kept, Pass::First);
      option.again_peak = forward_peak(segment, kept, Pass::Again);
      segment.options.push_back(option);
    }
  }

  const Simulator& simulator_;
  const Profile& profile_;
  const StorageUses& uses_;
  Segments& segments_;
  const Simulation plain_;
  const int storages_;
  const int operators_;
  std::vector<bool> is_needed_;  // per operator: runs again if nothing droppable is kept
  std::vector<int> left_after_;  // per storage: the last operator before the program lets go of the storage
  std::vector<int64_t> base_;    // per operator: level of all storages that are not droppable
};

}  // namespace

void measure_segments(const Simulator& simulator, const StorageUses& uses, Segments& segments) {
  Costs(simulator, uses, segments).measure();
}

}  // namespace snug::plan
