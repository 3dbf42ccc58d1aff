#include "snug/planner/simulator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/planner/detail/at.h"

// The rules of the executor
//
//  1. The forward pass runs as recorded. A storage is there from the operator that allocates it until the program drops it. What a backward pass
//     inside the forward pass asks for counts as dropped when autograd releases it last.
//  2. A kept storage stays on until the backward pass is done with it and no later replay reads it.
//  3. Unpack: a storage that is not there is rebuilt. Its producer, and recursively the producers of all that those need and
//     that is not there, run again in program order, each once. What is there is whatever the program, the plan or an
//     earlier Unpack that is not done yet still holds, at its last version.
//  4. What a replay makes beside the storage that was asked for is released after its last use in that replay, or right
//     after its operator if there is none; unless the plan holds it from this event on and there is a later use. Then it
//     stays until after the event of its last use. What is pinned is never taken from a replay. Replay schedules depend on the
//     plan alone, so last uses are known.
//  5. Done: a rebuilt storage is released, unless it is held.
//  6. A value is a (storage, version). Only last versions are unpacked and held. A replayed operator that writes in place
//     works on a storage rebuilt in the same replay: version v needs v - 1, down to the allocation. The original and the
//     copy being rebuilt may exist side by side.
//  7. External storages are at their last version when the backward pass runs. What read an older one, what is pinned, and
//     what an operator marked not replayable made is never rebuilt; a plan that would need it is impossible. So is what
//     depends on a storage that was written in place from outside.
//  8. While an operator runs, memory is the level with its outputs, plus its workspace.
//  9. An offloaded storage is written when the program lets go of it, if it is needed later and backward has not asked for it yet, and is gone
//     when it is written. What an Unpack needs of such is read before its replay. From the first time that backward needs it on it is held.
//
// Two walks: the first finds replays and last uses (a storage that is held stays, which only adds what is never read), the
// second counts bytes.

namespace snug {

using detail::at;

HoldFrom keep_all(const StepProfile& profile) {
  HoldFrom plan(profile.storages.size(), kNever);
  const std::vector<bool> saved = profile.saved_storages();
  for (size_t s = 0; s < plan.size(); ++s) {
    plan[s] = saved[s] ? kKeep : kNever;
  }
  return plan;
}

StepSimulator::StepSimulator(StepProfile profile) : profile_(std::move(profile)), producers_(profile_.storages.size()) {
  profile_.check();
  for (size_t s = 0; s < producers_.size(); ++s) {
    if (profile_.storages[s].kind == StorageKind::External) {
      producers_[s].push_back(-1);
    }
  }
  for (size_t i = 0; i < profile_.operators.size(); ++i) {
    const ProfiledOperator& op = profile_.operators[i];
    std::vector<ValueId> needs = op.reads;
    for (const ValueId& value : op.writes) {
      producers_[static_cast<size_t>(value.storage)].push_back(static_cast<int>(i));
      if (value.version > 0) {
        needs.push_back({value.storage, value.version - 1});
      }
    }
    needs_.push_back(std::move(needs));
  }
}

int StepSimulator::producer(ValueId value) const {
  return producers_[static_cast<size_t>(value.storage)][static_cast<size_t>(value.version)];
}

int StepSimulator::last_version(int storage) const {
  return static_cast<int>(producers_[static_cast<size_t>(storage)].size()) - 1;
}

class StepSimulator::Run {
 public:
  Run(const StepSimulator& model, const HoldFrom& plan, int64_t most_replayed = std::numeric_limits<int64_t>::max())
      : model_(model),
        profile_(model.profile_),
        plan_(plan),
        most_replayed_(most_replayed),
        program_(plan.size(), false),
        kept_(plan.size(), false),
        held_(plan.size(), false),
        uses_(plan.size(), 0),
        asked_before_drop_(plan.size(), false),
        marked_(profile_.operators.size(), -1),
        temporary_(plan.size(), -1) {
    result_.last_use.assign(plan.size(), -1);
    made_.reserve(64);
  }

  Simulation simulate() {
    if (!schedule()) {
      return std::move(result_);
    }
    count_bytes();
    return std::move(result_);
  }

  std::vector<LiveStorage> live() {
    if (schedule()) {
      count_bytes();
      capture_ = result_.peak_bytes;
      count_bytes();
    }
    return std::move(live_);
  }

 private:
  // A storage that a replay makes: allocated, and last needed, while the replay's operators of these numbers run.
  struct Made {
    int storage;
    int first;
    int last;
    bool whole;  // at its last version in the end
    bool holds;  // the plan wants it to stay
    bool stays;  // and something comes that needs it, or it is what was asked for
  };

  bool external(int s) const { return profile_.storages[at(s)].kind == StorageKind::External; }
  int64_t bytes(int s) const { return profile_.storages[at(s)].bytes; }
  bool there(int s) const { return program_[at(s)] || kept_[at(s)] || held_[at(s)] || uses_[at(s)] > 0; }

  bool available(ValueId value) const {
    return value.version == model_.last_version(value.storage) && (external(value.storage) || there(value.storage));
  }

  void touch(int s, int event) { result_.last_use[at(s)] = std::max(result_.last_use[at(s)], event); }

  // First walk. False: the plan is impossible, or the simulation is cut short.
  bool schedule() {
    const int events = static_cast<int>(profile_.events.size());
    for (int e = 0; e < events; ++e) {
      ++result_.steps;
      const ProfileEvent& event = profile_.events[at(e)];
      if (event.kind == EventKind::Forward) {
        for (const ValueId& value : profile_.operators[at(event.index)].writes) {
          program_[at(value.storage)] = true;
          kept_[at(value.storage)] = plan_[at(value.storage)] == kKeep;
        }
      } else if (event.kind == EventKind::Drop) {
        program_[at(event.index)] = false;
        if (plan_[at(event.index)] == kOffload && result_.last_use[at(event.index)] >= 0) {
          held_[at(event.index)] = asked_before_drop_[at(event.index)] = true;
        }
      } else if (event.kind == EventKind::Unpack && !external(event.index)) {
        if (!schedule_replay(e, event.index)) {
          return false;
        }
        touch(event.index, e);
        ++uses_[at(event.index)];
      } else if (event.kind == EventKind::Done && !external(event.index)) {
        --uses_[at(event.index)];
        if (plan_[at(event.index)] == kKeep) {
          touch(event.index, e);
        }
      }
    }
    return true;
  }

  bool schedule_replay(int event, int target) {
    Replay replay{event};
    pending_.assign(1, {target, model_.last_version(target)});
    while (!pending_.empty()) {
      const ValueId value = pending_.back();
      pending_.pop_back();
      ++result_.steps;
      if (available(value)) {
        touch(value.storage, event);
        continue;
      }
      if (plan_[at(value.storage)] == kOffload && value.version == model_.last_version(value.storage)) {
        replay.loads.push_back(value.storage);
        held_[at(value.storage)] = true;
        touch(value.storage, event);
        continue;
      }
      const int op = model_.producer(value);
      if (op < 0 || !profile_.operators[at(op)].replayable ||
          profile_.storages[at(value.storage)].kind != StorageKind::Activation) {
        result_.impossible = value.storage;
        return false;
      }
      if (marked_[at(op)] != event) {
        if (++result_.replayed > most_replayed_) {
          result_.is_cut_short = true;
          return false;
        }
        marked_[at(op)] = event;
        replay.operators.push_back(op);
        pending_.insert(pending_.end(), model_.needs(op).begin(), model_.needs(op).end());
      }
    }
    if (!replay.operators.empty() || !replay.loads.empty()) {
      std::sort(replay.operators.begin(), replay.operators.end());
      note_made(replay, event);
      result_.replays.push_back(std::move(replay));
    }
    return true;
  }

  // Which storages the replay makes, and until when it needs them.
  void note_made(const Replay& replay, int event) {
    std::vector<Made>& made = made_.emplace_back();
    for (int k = 0; k < static_cast<int>(replay.operators.size()); ++k) {
      const int op = replay.operators[at(k)];
      result_.steps += std::ssize(model_.needs(op)) + std::ssize(profile_.operators[at(op)].writes);
      for (const ValueId& value : model_.needs(op)) {
        if (!available(value)) {
          made[at(temporary_[at(value.storage)])].last = k;
        }
      }
      for (const ValueId& value : profile_.operators[at(op)].writes) {
        if (value.version == 0) {
          temporary_[at(value.storage)] = static_cast<int>(made.size());
          made.push_back({value.storage, k, k, false, false, false});
        }
        made[at(temporary_[at(value.storage)])].whole = value.version == model_.last_version(value.storage);
      }
    }
    for (Made& one : made) {
      const bool was_there = there(one.storage);
      one.whole = one.whole && !was_there;
      const bool may_be_rebuilt = profile_.storages[at(one.storage)].kind == StorageKind::Activation;
      one.holds = one.whole && may_be_rebuilt && plan_[at(one.storage)] <= event;
    }
    for (const Made& one : made) {
      held_[at(one.storage)] = held_[at(one.storage)] || one.holds;
      temporary_[at(one.storage)] = -1;
    }
  }

  // Second walk.
  void count_bytes() {
    const int events = static_cast<int>(profile_.events.size());
    program_.assign(program_.size(), false);
    kept_ = held_ = program_;
    uses_.assign(uses_.size(), 0);
    level_ = own_ = 0;
    next_replay_ = 0;
    double seconds = 0;
    result_.peak_bytes = 0;
    result_.offloaded.clear();
    result_.high.assign(at(events), 0);
    endings_.assign(at(events), {});
    for (int s = 0; s < static_cast<int>(plan_.size()); ++s) {
      if (result_.last_use[at(s)] >= 0 && !external(s)) {
        endings_[at(result_.last_use[at(s)])].push_back(s);
      }
    }
    for (int e = 0; e < events; ++e) {
      event_ = e;
      note_level(0);
      step(profile_.events[at(e)], seconds);
      for (const int s : endings_[at(e)]) {
        change(s, [&] { kept_[at(s)] = held_[at(s)] = false; });
      }
    }
    result_.seconds = seconds;
  }

  void step(const ProfileEvent& event, double& seconds) {
    const int s = event.index;
    switch (event.kind) {
      case EventKind::Forward:
        for (const ValueId& value : profile_.operators[at(s)].writes) {
          if (!external(value.storage)) {
            change(value.storage, [&] {
              program_[at(value.storage)] = true;
              kept_[at(value.storage)] = plan_[at(value.storage)] == kKeep && result_.last_use[at(value.storage)] >= 0;
            });
          }
        }
        note_level(profile_.operators[at(s)].workspace);
        seconds += profile_.operators[at(s)].seconds;
        return;
      case EventKind::Drop:
        drop(s, seconds);
        return;
      case EventKind::Unpack:
        if (!external(s)) {
          if (next_replay_ < result_.replays.size() && result_.replays[next_replay_].event == event_) {
            run_replay(s, seconds);
          }
          change(s, [&] { ++uses_[at(s)]; });
        }
        return;
      case EventKind::Done:
        if (!external(s)) {
          change(s, [&] { --uses_[at(s)]; });
        }
        return;
      case EventKind::Allocate:
        own_ += event.bytes;
        level_ += event.bytes;
        note_level(0);
        return;
      case EventKind::Release:
        own_ -= event.bytes;
        level_ -= event.bytes;
        return;
      case EventKind::Backward:
        seconds += profile_.backward[at(s)].seconds;
        return;
    }
  }

  void drop(int s, double& seconds) {
    const bool is_needed = plan_[at(s)] == kOffload && result_.last_use[at(s)] > event_;
    if (is_needed && !asked_before_drop_[at(s)]) {
      seconds += profile_.link.out_seconds(bytes(s));
      result_.offloaded.push_back(s);
    }
    change(s, [&] {
      program_[at(s)] = false;
      held_[at(s)] = held_[at(s)] || (is_needed && asked_before_drop_[at(s)]);
    });
  }

  void run_replay(int target, double& seconds) {
    const Replay& replay = result_.replays[next_replay_];
    for (const int s : replay.loads) {
      seconds += profile_.link.back_seconds(bytes(s));
      change(s, [&] { held_[at(s)] = true; });
    }
    std::vector<Made>& made = made_[next_replay_++];
    for (Made& one : made) {
      one.holds = one.holds && result_.last_use[at(one.storage)] > event_;
      one.stays = one.holds || (one.whole && one.storage == target);
    }
    sort_by_last(made, replay.operators.size());
    in_replay_ = &made;
    auto begins = made.begin();  // made is in the order of `first`
    auto ends = by_last_.begin();
    for (int k = 0; k < static_cast<int>(replay.operators.size()); ++k) {
      const ProfiledOperator& op = profile_.operators[at(replay.operators[at(k)])];
      replay_position_ = k;
      for (; begins != made.end() && begins->first == k; ++begins, ++result_.steps) {
        level_ += bytes(begins->storage);
      }
      note_level(op.workspace);
      seconds += op.seconds;
      for (; ends != by_last_.end() && made[at(*ends)].last == k; ++ends, ++result_.steps) {
        level_ -= made[at(*ends)].stays ? 0 : bytes(made[at(*ends)].storage);
      }
    }
    in_replay_ = nullptr;
    for (const Made& one : made) {
      if (one.stays) {
        level_ -= bytes(one.storage);  // counted anew here, or as a use by step()
      }
      if (one.holds) {
        change(one.storage, [&] { held_[at(one.storage)] = true; });
      }
    }
  }

  // Their places in `made`, by counting.
  void sort_by_last(const std::vector<Made>& made, size_t operators) {
    ends_before_.assign(operators + 1, 0);
    for (const Made& one : made) {
      ++ends_before_[at(one.last) + 1];
    }
    std::partial_sum(ends_before_.begin(), ends_before_.end(), ends_before_.begin());
    by_last_.resize(made.size());
    for (size_t i = 0; i < made.size(); ++i) {
      by_last_[at(ends_before_[at(made[i].last)]++)] = static_cast<int>(i);
    }
  }

  template <class F>
  void change(int s, F&& apply) {
    const bool before = there(s);
    apply();
    const bool after = there(s);
    if (before != after) {
      level_ += after ? bytes(s) : -bytes(s);
      if (after) {
        note_level(0);
      }
    }
  }

  void note_level(int64_t above) {
    const int64_t level = level_ + above;
    int64_t& high = result_.high[at(event_)];
    high = std::max(high, level);
    if (level > result_.peak_bytes) {
      result_.peak_bytes = level;
      result_.peak_event = event_;
    }
    if (level == capture_) {
      capture_ = -1;
      capture();
    }
  }

  void capture() {
    for (int s = 0; s < static_cast<int>(plan_.size()); ++s) {
      if (!external(s) && there(s)) {
        live_.push_back({s, bytes(s), false});
      }
    }
    if (in_replay_ != nullptr) {
      for (const Made& one : *in_replay_) {
        if (one.first <= replay_position_ && (one.last >= replay_position_ || one.stays)) {
          live_.push_back({one.storage, bytes(one.storage), true});
        }
      }
    }
  }

  const StepSimulator& model_;
  const StepProfile& profile_;
  const HoldFrom& plan_;
  const int64_t most_replayed_;
  Simulation result_;
  std::vector<bool> program_, kept_, held_;
  std::vector<int> uses_;
  std::vector<bool> asked_before_drop_;  // of those to offload
  std::vector<int> marked_;              // per operator: the event of the replay it was last put into
  std::vector<int> temporary_;           // per storage: its place in the replay's list
  std::vector<ValueId> pending_;
  std::vector<std::vector<Made>> made_;  // per replay
  std::vector<std::vector<int>> endings_;
  const std::vector<Made>* in_replay_ = nullptr;
  std::vector<int> by_last_, ends_before_;  // of the replay under way
  int replay_position_ = 0;
  size_t next_replay_ = 0;
  int event_ = 0;
  int64_t level_ = 0, own_ = 0, capture_ = -1;
  std::vector<LiveStorage> live_;
};

Simulation StepSimulator::run(const HoldFrom& hold_from, int64_t most_replayed) const {
  if (hold_from.size() != profile_.storages.size()) {
    throw ConfigError(
        fmt::format("StepSimulator: the plan has {} entries, the profile {} storages; they do not belong together",
                    hold_from.size(), profile_.storages.size()));
  }
  if (!profile_.link.is_open() && std::find(hold_from.begin(), hold_from.end(), kOffload) != hold_from.end()) {
    throw ConfigError("StepSimulator: the plan offloads, and the profile has no link to offload over; give it one");
  }
  return Run(*this, hold_from, most_replayed).simulate();
}

std::vector<LiveStorage> StepSimulator::live_at_peak(const HoldFrom& hold_from) const {
  return Run(*this, hold_from).live();
}

}  // namespace snug
