#pragma once
// ReplayFinder: the operators that run again so that one storage is there, and how long the replay needs each storage
// that they make. StepSimulator predicts replays with it, OpTape runs them. They are rules 3, 4 and 6 of simulator.cpp.

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "snug/profile.h"
#include "src/planner/at.h"

namespace snug::detail {

/// The storages and operators of a step, by number, as they are when a storage is asked for.
template <class T>
concept ReplaySource = requires(T& source, ValueId value, int storage, int op) {
  { source.last_version(storage) } -> std::same_as<int>;
  { source.is_there(storage) } -> std::same_as<bool>;  // at its last version
  { source.bring(storage) } -> std::same_as<bool>;     // likewise, or else it is loaded; called for each use
  { source.maker(value) } -> std::same_as<int>;        // the operator that can make it again; -1: none
  { source.needs(op) } -> std::convertible_to<std::span<const ValueId>>;  // with the version before each write in place
  { source.writes(op) } -> std::convertible_to<std::span<const ValueId>>;  // version 0 allocates
};

/// A storage that a replay makes. `first` and `last` are places in the replay's list of operators.
struct MadeAgain {
  int storage;
  int first;           // makes it
  int last;            // needs it last
  bool may_stay;       // at its last version in the end, and not there from before
  bool stays = false;  // it is not released after `last`; whoever runs the replay decides
};

struct FoundReplay {
  std::vector<int> operators = {};      // in program order
  std::vector<MadeAgain> made = {};     // in the order of `first`
  std::optional<ValueId> missing = {};  // nothing can make this value: there is no replay
  bool is_cut_short = false;            // more operators would run than was allowed: likewise
  int64_t looked_at = 0;                // values, to find it
};

class ReplayFinder {
 public:
  /// Storages that are there or can be loaded are brought; the producers of the rest run again. Cut short after `most`
  /// operators. The result holds until the next call.
  template <ReplaySource Source>
  const FoundReplay& find(Source& source, int target, int64_t most = std::numeric_limits<int64_t>::max()) {
    ++number_;
    found_.operators.clear();
    found_.made.clear();
    found_.missing.reset();
    found_.is_cut_short = false;
    found_.looked_at = 0;
    find_operators(source, target, most);
    if (!found_.missing && !found_.is_cut_short) {
      std::sort(found_.operators.begin(), found_.operators.end());
      find_lifetimes(source);
    }
    return found_;
  }

 private:
  template <ReplaySource Source>
  void find_operators(Source& source, int target, int64_t most) {
    pending_.assign(1, {target, source.last_version(target)});
    while (!pending_.empty()) {
      const ValueId value = pending_.back();
      pending_.pop_back();
      ++found_.looked_at;
      if (value.version == source.last_version(value.storage) && source.bring(value.storage)) {
        continue;
      }
      const int op = source.maker(value);
      if (op < 0) {
        found_.missing = value;
        return;
      }
      if (std::exchange(slot(replay_of_, op), number_) != number_) {
        found_.operators.push_back(op);
        if (std::ssize(found_.operators) > most) {
          found_.is_cut_short = true;
          return;
        }
        const std::span<const ValueId> needs = source.needs(op);
        pending_.insert(pending_.end(), needs.begin(), needs.end());
      }
    }
  }

  template <ReplaySource Source>
  void find_lifetimes(Source& source) {
    std::vector<MadeAgain>& made = found_.made;
    for (int k = 0; k < static_cast<int>(found_.operators.size()); ++k) {
      const std::span<const ValueId> needs = source.needs(found_.operators[at(k)]);
      const std::span<const ValueId> writes = source.writes(found_.operators[at(k)]);
      found_.looked_at += std::ssize(needs) + std::ssize(writes);
      for (const ValueId& value : needs) {
        if (value.version != source.last_version(value.storage) || !source.is_there(value.storage)) {
          made[at(place_of_[at(value.storage)])].last = k;
        }
      }
      for (const ValueId& value : writes) {
        if (value.version == 0) {
          slot(place_of_, value.storage) = static_cast<int>(made.size());
          made.push_back({value.storage, k, k, false});
        }
        made[at(place_of_[at(value.storage)])].may_stay = value.version == source.last_version(value.storage);
      }
    }
    for (MadeAgain& one : made) {
      one.may_stay = one.may_stay && !source.is_there(one.storage);
    }
  }

  static int& slot(std::vector<int>& list, int index) {
    if (at(index) >= list.size()) {
      list.resize(at(index) + 1, 0);
    }
    return list[at(index)];
  }

  FoundReplay found_;
  std::vector<ValueId> pending_;
  std::vector<int> replay_of_;  // per operator: the number of the last replay that it is in
  std::vector<int> place_of_;   // per storage: its place in `made`
  int number_ = 0;              // of this replay
};

/// The storages that a replay releases, by operator.
class ReleaseOrder {
 public:
  void sort(const std::vector<MadeAgain>& made, size_t operators);

  /// Their places in `made`: needed last by the operator at place `k`, and not to stay.
  std::span<const int> after(int k) const {
    const int begin = k == 0 ? 0 : ends_[at(k) - 1];
    return std::span(by_last_).subspan(at(begin), at(ends_[at(k)] - begin));
  }

 private:
  std::vector<int> by_last_;
  std::vector<int> ends_;  // per operator: the end of its part of `by_last_`
};

}  // namespace snug::detail
