#include "src/planner/segments.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "src/planner/at.h"
#include "src/planner/backward_order.h"
#include "src/planner/segment_costs.h"

// A step can be cut between any two operators. Storages that are made before a cut and read after the cut cross the
// cut. Long lists of operators are cut where the fewest bytes cross, once in each of many equal parts of the step's
// time and bytes.

namespace snug::plan {
namespace {

// A cut in an uneven position costs more: a whole part away from the even position, crossing bytes count more by this
// share.
constexpr double kPriceOfUnevenParts = 0.25;

class Cutter {
 public:
  Cutter(const Simulator& simulator, const StorageUses& uses)
      : simulator_(simulator),
        profile_(simulator.profile()),
        uses_(uses),
        storages_(static_cast<int>(profile_.storages.size())),
        operators_(static_cast<int>(profile_.operators.size())) {}

  Segments cut(int most) const {
    Segments result{.saved = uses_.saved, .droppable = uses_.droppable, .backward = uses_.backward};
    for (const Storage& storage : profile_.storages) {
      result.sizes.push_back(storage.bytes);
    }
    result.list = joined(parts(most));
    find_consumers(result);
    measure_segments(simulator_, uses_, result);
    return result;
  }

 private:
  int64_t bytes(int s) const { return profile_.storages[at(s)].bytes; }

  // Bytes that cross between operator i and the next. Between the first and the last write, a storage counts four
  // times, because no plan can hold a storage in the middle of writes in place.
  std::vector<int64_t> crossing_bytes() const {
    std::vector<int64_t> change(at(operators_) + 1, 0);
    for (int s = 0; s < storages_; ++s) {
      if (uses_.droppable[at(s)] && uses_.first_writer[at(s)] != StorageUses::kNone) {
        change[at(uses_.first_writer[at(s)])] += 4 * bytes(s);
        change[at(uses_.last_writer[at(s)])] -= 3 * bytes(s);
        change[at(uses_.last_user(s))] -= bytes(s);
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

  // Weight of each operator: shares of time, of droppable bytes and of the number of operators. The sum is about 3.
  std::vector<double> weights() const {
    double seconds = 1e-12;
    double all_bytes = 1;
    for (int i = 0; i < operators_; ++i) {
      seconds += profile_.operators[at(i)].seconds;
    }
    for (int s = 0; s < storages_; ++s) {
      all_bytes += uses_.droppable[at(s)] ? static_cast<double>(bytes(s)) : 0;
    }
    std::vector<double> result;
    for (int i = 0; i < operators_; ++i) {
      double made = 0;
      for (const Value& value : profile_.operators[at(i)].writes) {
        const bool counts = value.version == 0 && uses_.droppable[at(value.storage)];
        made += counts ? static_cast<double>(bytes(value.storage)) : 0;
      }
      result.push_back(profile_.operators[at(i)].seconds / seconds + made / all_bytes + 1.0 / operators_);
    }
    return result;
  }

  // Cut k is the best position within half a part of the end of part k.
  std::vector<Segment> parts(int most) const {
    std::vector<Segment> result;
    const std::vector<int64_t> crossing = crossing_bytes();
    const std::vector<double> weight = weights();
    const double part = operators_ <= most ? 0 : 3.0 / most;
    int first = 0;
    int best = StorageUses::kNone;
    double least = 0;
    double sum = 0;
    int number = 0;  // of the cut
    const auto end_part = [&] {
      if (best != StorageUses::kNone) {
        result.push_back({first, best});
        first = best + 1;
        best = StorageUses::kNone;
      }
    };
    for (int i = 0; i + 1 < operators_; ++i) {
      sum += weight[at(i)];
      const double parts = part == 0 ? i + 1 : sum / part;
      const int nearest = static_cast<int>(parts + 0.5);
      if (nearest != std::exchange(number, nearest)) {
        end_part();
      }
      const double price = static_cast<double>(crossing[at(i)]) * (1 + kPriceOfUnevenParts * std::abs(parts - nearest));
      if (nearest > 0 && nearest < most && (best == StorageUses::kNone || price < least)) {
        best = i;
        least = price;
      }
    }
    end_part();
    result.push_back({first, operators_ - 1});
    return result;
  }

  // If nothing is unpacked for a segment, the beginning of the segment's backward pass is not known. The segment is
  // joined to the next segment, or at the end to the segment before.
  std::vector<Segment> joined(const std::vector<Segment>& parts) const {
    const std::vector<int> events = backward_events(profile_, uses_);
    std::vector<Segment> result;
    int first = 0;
    for (Segment part : parts) {
      part.backward_begin = StorageUses::kNone;
      for (int i = part.last; i >= part.first && part.backward_begin == StorageUses::kNone; --i) {
        part.backward_begin = events[at(i)];
      }
      if (part.backward_begin != StorageUses::kNone) {
        part.first = std::exchange(first, part.last + 1);
        result.push_back(part);
      }
    }
    if (result.empty()) {
      result.push_back({0, operators_ - 1, uses_.backward});
    }
    result.back().last = operators_ - 1;
    return result;
  }

  void find_consumers(Segments& segments) const {
    std::vector<int> segment_of(at(operators_), 0);
    for (int k = 0; k < segments.count(); ++k) {
      const Segment& segment = segments.list[at(k)];
      std::fill(segment_of.begin() + segment.first, segment_of.begin() + segment.last + 1, k);
    }
    segments.consumers.assign(at(storages_), {});
    for (int s = 0; s < storages_; ++s) {
      for (const int reader : uses_.readers[at(s)]) {
        std::vector<int>& consumers = segments.consumers[at(s)];
        if (consumers.empty() || consumers.back() != segment_of[at(reader)]) {
          consumers.push_back(segment_of[at(reader)]);
        }
      }
      if (uses_.droppable[at(s)] && uses_.first_writer[at(s)] != StorageUses::kNone) {
        segments.list[at(segment_of[at(uses_.last_writer[at(s)])])].made.push_back(s);
      }
    }
  }

  const Simulator& simulator_;
  const Profile& profile_;
  const StorageUses& uses_;
  const int storages_;
  const int operators_;
};

}  // namespace

void Segments::raise(const Profile& profile, int event, int64_t bytes) {
  if (event >= backward) {
    const auto under_way =
        std::find_if(list.begin(), list.end(), [&](const Segment& one) { return one.backward_begin <= event; });
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

Segments cut_into_segments(const Simulator& simulator, const StorageUses& uses, int most) {
  return simulator.profile().operators.empty() ? Segments() : Cutter(simulator, uses).cut(most);
}

}  // namespace snug::plan
