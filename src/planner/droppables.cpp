#include "src/planner/droppables.h"

#include <algorithm>
#include <limits>

#include "src/planner/at.h"

namespace snug::plan {
namespace {

constexpr double kNoWay = std::numeric_limits<double>::infinity();

// The other operators that have to run for a storage: see the top of bound.cpp.
class Feeders {
 public:
  Feeders(const Simulator& simulator, const std::vector<bool>& saved)
      : simulator_(simulator),
        profile_(simulator.profile()),
        saved_(saved),
        reader_(saved.size(), kNobody),
        dropped_(saved.size(), 0) {
    for (int i = 0; i < static_cast<int>(profile_.operators.size()); ++i) {
      for (const Value& value : simulator_.needs(i)) {
        int& reader = reader_[at(value.storage)];
        reader = reader == kNobody || reader == i ? i : kMany;
      }
    }
    for (int e = 0; e < static_cast<int>(profile_.events.size()); ++e) {
      if (profile_.events[at(e)].kind == EventKind::Drop) {
        dropped_[at(profile_.events[at(e)].index)] = e + 1;
      }
    }
  }

  /// `gone`: the first event in which storage `s` may be absent.
  double seconds(int s, int gone) const {
    const int op = only_maker(s);
    return op < 0 || saved_results(op) != 1 ? 0 : inputs_of(op, profile_.storages[at(s)].bytes, gone);
  }

 private:
  static constexpr int kNobody = -1;
  static constexpr int kMany = -2;

  double inputs_of(int op, int64_t bytes, int gone) const {
    double seconds = 0;
    for (const Value& value : simulator_.needs(op)) {
      const int s = value.storage;
      const int maker = only_maker(s);
      if (maker >= 0 && !saved_[at(s)] && reader_[at(s)] == op && profile_.storages[at(s)].bytes >= bytes &&
          dropped_[at(s)] > 0 && dropped_[at(s)] <= gone && profile_.operators[at(maker)].writes.size() == 1) {
        seconds += profile_.operators[at(maker)].seconds + inputs_of(maker, bytes, gone);
      }
    }
    return seconds;
  }

  // The operator that made the only version of a storage; -1 for a storage of another kind or with several versions.
  int only_maker(int s) const {
    return profile_.storages[at(s)].kind == StorageKind::Activation && simulator_.last_version(s) == 0
               ? simulator_.producer({s, 0})
               : -1;
  }

  int saved_results(int op) const {
    int count = 0;
    for (const Value& value : profile_.operators[at(op)].writes) {
      count += saved_[at(value.storage)] ? 1 : 0;
    }
    return count;
  }

  const Simulator& simulator_;
  const Profile& profile_;
  const std::vector<bool>& saved_;
  std::vector<int> reader_;   // per storage: the only operator that needs the storage; kNobody, kMany
  std::vector<int> dropped_;  // the event after which the program has let go of the storage; 0: never
};

}  // namespace

double least_transfer_seconds(const Profile& profile) { return profile.link.is_open() ? 0 : kNoWay; }

std::vector<double> own_seconds(const Simulator& simulator, const std::vector<bool>& saved) {
  const Profile& profile = simulator.profile();
  std::vector<double> seconds(saved.size(), 0);
  for (const Operator& op : profile.operators) {
    std::vector<int> written;
    for (const Value& value : op.writes) {
      if (saved[static_cast<size_t>(value.storage)]) {
        written.push_back(value.storage);
      }
    }
    std::sort(written.begin(), written.end());
    written.erase(std::unique(written.begin(), written.end()), written.end());
    for (const int s : written) {
      const bool possible = op.replayable && profile.storages[static_cast<size_t>(s)].kind == StorageKind::Activation;
      seconds[static_cast<size_t>(s)] += possible ? op.seconds / static_cast<double>(written.size()) : kNoWay;
    }
  }
  return seconds;
}

std::vector<Droppable> droppables(const Simulator& simulator) {
  const Profile& profile = simulator.profile();
  const std::vector<bool> saved = profile.saved_storages();
  const std::vector<double> seconds = own_seconds(simulator, saved);
  std::vector<Droppable> result;
  std::vector<int> place(saved.size(), -1);
  for (size_t s = 0; s < saved.size(); ++s) {
    const bool may_be_absent = seconds[s] < kNoWay || profile.link.is_open();
    if (saved[s] && may_be_absent && profile.storages[s].bytes > 0) {
      place[s] = static_cast<int>(result.size());
      result.push_back({static_cast<int>(s), profile.storages[s].bytes, seconds[s], {}});
    }
  }
  std::vector<int> users(saved.size(), 0);  // the program, and uses by the backward pass that are not done
  std::vector<int> gone(saved.size(), -1);
  const auto change = [&](int s, int by, int event) {
    const size_t i = static_cast<size_t>(s);
    if (place[i] < 0) {
      return;
    }
    if (users[i] == 0 && gone[i] >= 0) {
      result[static_cast<size_t>(place[i])].gaps.emplace_back(gone[i], event);
    }
    users[i] += by;
    gone[i] = users[i] == 0 ? event : -1;
  };
  for (int e = 0; e < static_cast<int>(profile.events.size()); ++e) {
    const Event& event = profile.events[static_cast<size_t>(e)];
    if (event.kind == EventKind::Forward) {
      for (const Value& value : profile.operators[static_cast<size_t>(event.index)].writes) {
        change(value.storage, value.version == 0 ? 1 : 0, e);
      }
    } else if (event.kind == EventKind::Unpack) {
      change(event.index, 1, e);
    } else if (event.kind == EventKind::Drop || event.kind == EventKind::Done) {
      change(event.index, -1, e);
    }
  }
  const Feeders feeders(simulator, saved);
  for (Droppable& one : result) {
    one.seconds += one.gaps.empty() ? 0 : feeders.seconds(one.storage, one.gaps.front().first);
    one.seconds = std::min(one.seconds, least_transfer_seconds(profile));
  }
  std::stable_sort(result.begin(), result.end(), [](const Droppable& a, const Droppable& b) {
    return a.seconds * static_cast<double>(b.bytes) < b.seconds * static_cast<double>(a.bytes);
  });
  return result;
}

}  // namespace snug::plan
