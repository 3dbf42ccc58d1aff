#include "snug/planner/detail/segments.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "snug/planner/detail/at.h"

// Between any two operators a step can be cut: what was made before and is read after crosses. Long lists are cut where the
// fewest bytes cross, once in each of many equal parts of the step's time and bytes.

namespace snug::detail {
namespace {

constexpr int kMostOptions = 12;
constexpr int kNone = -1;

class Cutter {
 public:
  explicit Cutter(const plan::StepSimulator& simulator)
      : simulator_(simulator),
        profile_(simulator.profile()),
        plain_(simulator.run(plan::keep_all(profile_))),
        storages_(static_cast<int>(profile_.storages.size())),
        operators_(static_cast<int>(profile_.operators.size())),
        first_writer_(profile_.storages.size(), kNone),
        last_writer_(profile_.storages.size(), kNone),
        readers_(profile_.storages.size()),
        is_needed_(profile_.operators.size(), false) {
    result_.saved = profile_.saved_storages();
    result_.plain_peak = plain_.peak_bytes;
    for (const StorageInfo& storage : profile_.storages) {
      result_.sizes.push_back(storage.bytes);
    }
    find_writers_and_readers();
    find_backward();
    find_droppable();
    find_needed();
  }

  Segments cut(int most) && {
    find_begins();
    place_cuts(most);
    join_those_without_begin();
    find_consumers();
    measure_bases();
    measure_backward();
    for (Segment& segment : result_.list) {
      measure_forward(segment);
    }
    return std::move(result_);
  }

 private:
  int64_t bytes(int s) const { return profile_.storages[at(s)].bytes; }
  bool is_external(int s) const { return profile_.storages[at(s)].kind == StorageKind::External; }
  int last_user(int s) const {
    return std::max(last_writer_[at(s)], readers_[at(s)].empty() ? kNone : readers_[at(s)].back());
  }

  void find_writers_and_readers() {
    for (int i = 0; i < operators_; ++i) {
      for (const ValueId& value : simulator_.needs(i)) {
        std::vector<int>& readers = readers_[at(value.storage)];
        if (readers.empty() || readers.back() != i) {
          readers.push_back(i);
        }
      }
      for (const ValueId& value : profile_.operators[at(i)].writes) {
        int& first = first_writer_[at(value.storage)];
        first = first == kNone ? i : first;
        last_writer_[at(value.storage)] = i;
      }
    }
  }

  void find_backward() {
    for (int e = 0; e < static_cast<int>(profile_.events.size()); ++e) {
      if (profile_.events[at(e)].kind == EventKind::Forward) {
        result_.backward = e + 1;
      }
    }
  }

  void find_droppable() {
    result_.droppable.assign(at(storages_), false);
    for (int e = 0; e < result_.backward; ++e) {
      const ProfileEvent& event = profile_.events[at(e)];
      if (event.kind == EventKind::Drop && profile_.storages[at(event.index)].kind == StorageKind::Activation) {
        result_.droppable[at(event.index)] = true;
      }
    }
    for (const ProfiledOperator& op : profile_.operators) {
      for (const ValueId& value : op.writes) {
        result_.droppable[at(value.storage)] = result_.droppable[at(value.storage)] && op.replayable;
      }
    }
  }

  // Operators that run again where nothing droppable is kept.
  void find_needed() {
    for (int i = operators_; i-- > 0;) {
      for (const ValueId& value : profile_.operators[at(i)].writes) {
        const bool is_saved = result_.saved[at(value.storage)] && !is_external(value.storage);
        is_needed_[at(i)] = is_needed_[at(i)] || (is_saved && result_.droppable[at(value.storage)]);
      }
      if (!is_needed_[at(i)]) {
        continue;
      }
      for (const ValueId& value : simulator_.needs(i)) {
        const int op = simulator_.producer(value);
        if (op >= 0 && result_.droppable[at(value.storage)]) {
          is_needed_[at(op)] = true;
        }
      }
    }
  }

  // Bytes that cross between operator i and the next. Nothing can be held in the middle of what is written in place.
  std::vector<int64_t> crossing_bytes() const {
    std::vector<int64_t> change(at(operators_) + 1, 0);
    for (int s = 0; s < storages_; ++s) {
      if (result_.droppable[at(s)] && first_writer_[at(s)] != kNone) {
        change[at(first_writer_[at(s)])] += 4 * bytes(s);
        change[at(last_writer_[at(s)])] -= 3 * bytes(s);
        change[at(last_user(s))] -= bytes(s);
      }
    }
    std::vector<int64_t> crossing(at(operators_), 0);
    int64_t level = 0;
    for (int i = 0; i < operators_; ++i) {
      level += change[at(i)];
      crossing[at(i)] = level;
    }
    return crossing;
  }

  std::vector<double> weights() const {
    double seconds = 1e-12;
    double all_bytes = 1;
    for (int i = 0; i < operators_; ++i) {
      seconds += profile_.operators[at(i)].seconds;
    }
    for (int s = 0; s < storages_; ++s) {
      all_bytes += result_.droppable[at(s)] ? static_cast<double>(bytes(s)) : 0;
    }
    std::vector<double> result;
    for (int i = 0; i < operators_; ++i) {
      double made = 0;
      for (const ValueId& value : profile_.operators[at(i)].writes) {
        const bool counts = value.version == 0 && result_.droppable[at(value.storage)];
        made += counts ? static_cast<double>(bytes(value.storage)) : 0;
      }
      result.push_back(profile_.operators[at(i)].seconds / seconds + made / all_bytes + 1.0 / operators_);
    }
    return result;
  }

  void place_cuts(int most) {
    const std::vector<int64_t> crossing = crossing_bytes();
    const std::vector<double> weight = weights();
    const double part = 3.0 / most;
    int first = 0;
    int best = kNone;
    double sum = 0;
    double next = operators_ <= most ? 0 : 1.5 * part;
    for (int i = 0; i + 1 < operators_; ++i) {
      sum += weight[at(i)];
      best = best == kNone || crossing[at(i)] < crossing[at(best)] ? i : best;
      if (sum + weight[at(i + 1)] > next) {
        result_.list.push_back({first, best});
        first = best + 1;
        best = kNone;
        next = operators_ <= most ? 0 : std::max(next + part, sum);
      }
    }
    if (first < operators_) {
      result_.list.push_back({first, operators_ - 1});
    }
  }

  void find_consumers() {
    segment_of_.assign(at(operators_), 0);
    for (int k = 0; k < result_.count(); ++k) {
      const Segment& segment = result_.list[at(k)];
      std::fill(segment_of_.begin() + segment.first, segment_of_.begin() + segment.last + 1, k);
    }
    result_.consumers.assign(at(storages_), {});
    for (int s = 0; s < storages_; ++s) {
      for (const int reader : readers_[at(s)]) {
        std::vector<int>& consumers = result_.consumers[at(s)];
        if (consumers.empty() || consumers.back() != segment_of_[at(reader)]) {
          consumers.push_back(segment_of_[at(reader)]);
        }
      }
      if (result_.droppable[at(s)] && first_writer_[at(s)] != kNone) {
        result_.list[at(segment_of_[at(last_writer_[at(s)])])].made.push_back(s);
      }
    }
  }

  // The backward pass goes through the operators from the last to the first. An Unpack tells that it has come at least to the last of the
  // operators that make or read the storage, of those where it may be: not after the one before, nor where the storage was unpacked before.
  void find_begins() {
    std::vector<std::vector<int>> users = readers_;
    for (const ProfileEvent& event : profile_.events) {
      if (event.kind == EventKind::Forward) {
        for (const ValueId& value : profile_.operators[at(event.index)].writes) {
          users[at(value.storage)].push_back(event.index);
        }
      }
    }
    for (std::vector<int>& list : users) {
      std::sort(list.begin(), list.end());
      list.erase(std::unique(list.begin(), list.end()), list.end());
    }
    std::vector<int> in_use(at(storages_), 0);
    begin_of_.assign(at(operators_), kNone);
    int now = operators_ - 1;
    for (int e = result_.backward; e < static_cast<int>(profile_.events.size()); ++e) {
      const ProfileEvent& event = profile_.events[at(e)];
      if (event.kind == EventKind::Done) {
        --in_use[at(event.index)];
      } else if (event.kind == EventKind::Unpack && in_use[at(event.index)]++ == 0) {
        std::vector<int>& list = users[at(event.index)];
        while (!list.empty() && list.back() > now) {
          list.pop_back();
        }
        if (!list.empty()) {
          now = list.back();
          list.pop_back();
          begin_of_[at(now)] = begin_of_[at(now)] == kNone ? e : begin_of_[at(now)];
        }
      }
    }
  }

  // When the backward pass comes to a segment is not known where nothing unpacks for it.
  void join_those_without_begin() {
    for (Segment& segment : result_.list) {
      segment.begin = kNone;
      for (int i = segment.last; i >= segment.first && segment.begin == kNone; --i) {
        segment.begin = begin_of_[at(i)];
      }
    }
    std::vector<Segment> joined;
    int first = 0;
    for (const Segment& segment : result_.list) {
      if (segment.begin != kNone) {
        joined.push_back(segment);
        joined.back().first = first;
        first = segment.last + 1;
      }
    }
    if (joined.empty()) {
      joined.push_back({0, operators_ - 1, result_.backward});
    }
    joined.back().last = operators_ - 1;
    result_.list = std::move(joined);
  }

  // Of the program's and the backward pass's own bytes, and what has to stay in every plan; and in the forward pass also of what the program still
  // has although no operator of the segment or after it reads it.
  void measure_bases() {
    const int events = static_cast<int>(profile_.events.size());
    std::vector<int64_t> level(at(events) + 1, 0);  // changes at first
    std::vector<int> made_at(at(storages_), kNone);
    std::vector<int> event_of(at(operators_), 0);
    left_at_.assign(at(storages_), events);
    for (int e = 0; e < events; ++e) {
      const ProfileEvent& event = profile_.events[at(e)];
      if (event.kind == EventKind::Forward) {
        for (const ValueId& value : profile_.operators[at(event.index)].writes) {
          made_at[at(value.storage)] = value.version == 0 ? e : made_at[at(value.storage)];
        }
        event_of[at(event.index)] = e;
      } else if (event.kind == EventKind::Drop) {
        left_at_[at(event.index)] = e;
      } else if (event.kind == EventKind::Allocate || event.kind == EventKind::Release) {
        level[at(e)] += event.kind == EventKind::Allocate ? event.bytes : -event.bytes;
      }
    }
    for (int s = 0; s < storages_; ++s) {
      if (is_external(s) || made_at[at(s)] == kNone) {
        continue;
      }
      if (!result_.droppable[at(s)]) {
        level[at(made_at[at(s)])] += bytes(s);
        level[at(std::max(left_at_[at(s)], plain_.last_use[at(s)]))] -= bytes(s);
      } else if (!result_.saved[at(s)]) {
        const int end = event_of[at(result_.list[at(segment_of_[at(last_user(s))])].last)] + 1;
        level[at(std::min(end, left_at_[at(s)]))] += bytes(s);
        level[at(left_at_[at(s)])] -= bytes(s);
      }
    }
    for (size_t e = 1; e < level.size(); ++e) {
      level[e] += level[e - 1];
    }
    for (Segment& segment : result_.list) {
      segment.backward_base = level[at(segment.begin)];
    }
    base_.clear();
    for (int i = 0; i < operators_; ++i) {
      base_.push_back(level[at(event_of[at(i)])]);
    }
    left_after_.assign(at(storages_), operators_);
    for (int s = 0; s < storages_; ++s) {
      left_after_[at(s)] =
          static_cast<int>(std::upper_bound(event_of.begin(), event_of.end(), left_at_[at(s)]) - event_of.begin()) - 1;
    }
  }

  void measure_backward() {
    // What segments before k hold in plain training, when k's backward pass begins.
    std::vector<int64_t> before(result_.list.size() + 1, 0);
    for (int k = 0; k < result_.count(); ++k) {
      before[at(k) + 1] = before[at(k)];
      for (const int s : result_.list[at(k)].made) {
        before[at(k) + 1] += result_.saved[at(s)] ? bytes(s) : 0;
      }
    }
    int end = static_cast<int>(profile_.events.size());
    for (int k = 0; k < result_.count(); ++k) {
      Segment& segment = result_.list[at(k)];
      for (int e = segment.begin; e < end; ++e) {
        segment.backward_peak = std::max(segment.backward_peak, plain_.high[at(e)] - before[at(k)]);
      }
      end = std::min(end, segment.begin);
    }
  }

  enum class Pass { First, Again };

  // Highest level of a forward pass through the segment that keeps `kept`. The first time, a storage is there until the program lets go of it.
  int64_t forward_peak(const Segment& segment, const std::vector<bool>& kept, Pass pass) const {
    const size_t count = at(segment.last - segment.first) + 1;
    std::vector<int64_t> taken(count, 0), given_back(count, 0);  // by each operator
    for (const int s : segment.made) {
      const int last = pass == Pass::First ? std::max(left_after_[at(s)], last_user(s)) : last_user(s);
      taken[at(std::max(first_writer_[at(s)], segment.first) - segment.first)] += bytes(s);
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

  // Of `dropped`, from what is kept and from before the segment.
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
          result.needs_unsaved_inputs = result.needs_unsaved_inputs || (op >= 0 && !result_.saved[at(s)]);
          continue;
        }
        if (op > segment.last || ran[at(op - segment.first)]) {
          continue;
        }
        ran[at(op - segment.first)] = true;
        result.seconds += profile_.operators[at(op)].seconds;
        for (const ValueId& value : simulator_.needs(op)) {
          if (result_.droppable[at(value.storage)] && !kept[at(value.storage)]) {
            pending.push_back(value.storage);
          }
        }
      }
    }
    return result;
  }

  // An option drops the saved storages that are cheapest to rebuild for their bytes; the next one drops one storage more.
  void measure_forward(Segment& segment) const {
    for (int i = segment.first; i <= segment.last; ++i) {
      segment.seconds += is_needed_[at(i)] ? profile_.operators[at(i)].seconds : 0;
    }
    std::vector<bool> kept(at(storages_), false);
    segment.first_peak = forward_peak(segment, kept, Pass::First);
    segment.again_peak = forward_peak(segment, kept, Pass::Again);
    int64_t saved = 0;
    for (const int s : segment.made) {
      kept[at(s)] = result_.saved[at(s)];
      saved += result_.saved[at(s)] ? bytes(s) : 0;
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
    const int all = static_cast<int>(ranked.size());
    for (int i = 0; i <= all; ++i) {
      if (i * kMostOptions / std::max(1, all) != (i - 1) * kMostOptions / std::max(1, all) || i == 0 || i == all) {
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
      if (i < all) {
        option.dropped.push_back(ranked[at(i)].second);
        kept[at(ranked[at(i)].second)] = false;
      }
    }
  }

  const plan::StepSimulator& simulator_;
  const StepProfile& profile_;
  const plan::Simulation plain_;
  const int storages_;
  const int operators_;
  std::vector<int> first_writer_, last_writer_;  // per storage, operators
  std::vector<std::vector<int>> readers_;        // likewise, ascending
  std::vector<bool> is_needed_;                  // per operator
  std::vector<int> segment_of_;                  // per operator
  std::vector<int> begin_of_;    // per operator: the event in which the backward pass comes to it, if it is known
  std::vector<int> left_at_;     // per storage: the event in which the program lets go of it
  std::vector<int> left_after_;  // likewise, the last operator before
  std::vector<int64_t> base_;    // per operator
  //                          // event after the last operator
  Segments result_;
};

}  // namespace

void Segments::raise(const StepProfile& profile, int event, int64_t bytes) {
  if (event >= backward) {
    const auto under_way =
        std::find_if(list.begin(), list.end(), [&](const Segment& one) { return one.begin <= event; });
    (under_way == list.end() ? list.back() : *under_way).backward_peak += bytes;
    return;
  }
  while (event > 0 && profile.events[at(event)].kind != EventKind::Forward) {
    --event;
  }
  const int op = profile.events[at(event)].kind == EventKind::Forward ? profile.events[at(event)].index : 0;
  Segment& segment = *std::find_if(list.begin(), list.end(), [&](const Segment& one) { return op <= one.last; });
  segment.first_peak += bytes;
  for (SegmentOption& option : segment.options) {
    option.first_peak += bytes;
  }
}

Segments cut_into_segments(const plan::StepSimulator& simulator, int most) {
  return simulator.profile().operators.empty() ? Segments() : Cutter(simulator).cut(most);
}

}  // namespace snug::detail
