#pragma once
// ReplayFinder: the operators that run again to rebuild a storage, and how long the replay needs each storage that the
// operators make. Simulator predicts replays with ReplayFinder, and TapeReplays runs the replays. Replays follow rules
// 3, 4 and 6 of simulator.cpp.

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "src/planner/at.h"
#include "src/planner/profile.h"

namespace snug::plan {

/// The storages and operators of a step, by number, at the moment when the backward pass asks for a storage.
template <class T>
concept ReplaySource = requires(T& source, Value value, int storage, int op) {
  { source.last_version(storage) } -> std::same_as<int>;
  { source.is_there(storage) } -> std::same_as<bool>;  // in memory, at the last version
  {
    source.bring(storage)
  } -> std::same_as<bool>;                       // in memory, or else loaded, at the last version; called for each use
  { source.maker(value) } -> std::same_as<int>;  // the operator that can make the value again; -1: no operator
  { source.needs(op) } -> std::convertible_to<std::span<const Value>>;   // also the version before each write in place
  { source.writes(op) } -> std::convertible_to<std::span<const Value>>;  // version 0 allocates
};

/// A storage that a replay makes. `first` and `last` are positions in the replay's list of operators.
struct MadeAgain {
  int storage;
  int first;           // the operator that makes the storage
  int last;            // the last operator that needs the storage
  bool may_stay;       // at the last version after the replay, and not in memory before
  bool stays = false;  // not released after `last`; the caller decides
};

/// A replay, or the reason why no replay exists.
struct FoundReplay {
  std::vector<int> operators = {};    // in program order
  std::vector<MadeAgain> made = {};   // in the order of `first`
  std::optional<Value> missing = {};  // a value that nothing can make: no replay exists
  bool is_cut_short = false;          // more operators had to run than was allowed: no replay
  int64_t looked_at = 0;              // values that the search examined
};

/// Finds replays; keeps memory from replay to replay.
class ReplayFinder {
 public:
  /// The replay for the last versions of `targets`. Storages that are in memory or can be loaded are brought; the
  /// producers of all other needed values run again. The search is cut short after `most` operators. The result is
  /// valid until the next call.
  template <ReplaySource Source>
  const FoundReplay& find(Source& source, std::span<const int> targets,
                          int64_t most = std::numeric_limits<int64_t>::max()) {
    ++number_;
    found_.operators.clear();
    found_.made.clear();
    found_.missing.reset();
    found_.is_cut_short = false;
    found_.looked_at = 0;
    find_operators(source, targets, most);
    if (!found_.missing && !found_.is_cut_short) {
      std::sort(found_.operators.begin(), found_.operators.end());
      find_lifetimes(source);
    }
    return found_;
  }

 private:
  template <ReplaySource Source>
  void find_operators(Source& source, std::span<const int> targets, int64_t most) {
    pending_.clear();
    for (const int target : targets) {
      pending_.push_back({target, source.last_version(target)});
    }
    while (!pending_.empty()) {
      const Value value = pending_.back();
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
        const std::span<const Value> needs = source.needs(op);
        pending_.insert(pending_.end(), needs.begin(), needs.end());
      }
    }
  }

  template <ReplaySource Source>
  void find_lifetimes(Source& source) {
    std::vector<MadeAgain>& made = found_.made;
    for (int k = 0; k < static_cast<int>(found_.operators.size()); ++k) {
      const std::span<const Value> needs = source.needs(found_.operators[at(k)]);
      const std::span<const Value> writes = source.writes(found_.operators[at(k)]);
      found_.looked_at += std::ssize(needs) + std::ssize(writes);
      for (const Value& value : needs) {
        if (value.version != source.last_version(value.storage) || !source.is_there(value.storage)) {
          made[at(place_of_[at(value.storage)])].last = k;
        }
      }
      for (const Value& value : writes) {
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
  std::vector<Value> pending_;
  std::vector<int> replay_of_;  // per operator: the number of the last replay with the operator
  std::vector<int> place_of_;   // per storage: the position in `made`
  int number_ = 0;              // of the current replay
};

/// The storages that a replay releases, by the operator after which they are released.
class ReleaseOrder {
 public:
  /// Takes a replay with so many operators.
  void sort(std::span<const MadeAgain> made, size_t operators);

  /// Positions in `made` of the storages that operator `k` of the replay is the last to need, and that do not stay.
  std::span<const int> after(int k) const {
    const int begin = k == 0 ? 0 : ends_[at(k) - 1];
    return std::span(by_last_).subspan(at(begin), at(ends_[at(k)] - begin));
  }

 private:
  std::vector<int> by_last_;
  std::vector<int> ends_;  // per operator: the end of the operator's part of `by_last_`
};

}  // namespace snug::plan
