#include "src/planner/simulator.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/planner/at.h"
#include "src/planner/replay.h"
#include "src/planner/streams.h"

// The rules of the executor
//
//  1. The forward pass runs as recorded. A storage is in memory from the operator that allocates the storage until the
//     program drops the storage. If a backward pass inside the forward pass asks for the storage, the drop is the
//     moment when autograd releases the storage for the last time.
//  2. A kept storage stays until the backward pass is done with the storage and no later replay reads the storage.
//  3. Unpack: an absent storage is rebuilt. The storage's producer runs again, and, recursively, the producers of all
//     absent storages that these producers need; all in program order, each once. A storage is present if the program,
//     the plan or an earlier Unpack that is not done yet still holds the storage at the last version.
//  4. A replay also makes storages that the Unpack did not ask for. Each is released after its last use in the replay,
//     or right after its operator if the replay does not use the storage. Exception: the plan holds the storage from
//     this event on, and a later use exists. Then the storage stays until after the event of the last use. A pinned
//     storage is never taken from a replay. Replay schedules depend on the plan alone, so last uses are known.
//  5. Done: a rebuilt storage is released, unless the plan holds the storage.
//  6. A value is a (storage, version). Only last versions are unpacked and held. A replayed operator that writes in
//     place works on a storage rebuilt in the same replay: version v needs v - 1, down to the allocation. The original
//     and the copy being rebuilt may exist side by side.
//  7. External storages are at their last version when the backward pass runs. Some storages are never rebuilt,
//     and a plan that needs to rebuild them is impossible:
//       - results of operators that read an older version of an external storage;
//       - pinned storages;
//       - results of operators that are marked not replayable;
//       - storages that depend on a storage that was written in place from outside.
//  8. While an operator runs, memory is the level with the operator's outputs, plus the operator's workspace.
//  9. An offloaded storage is written when the program lets go of the storage, if the storage is needed later and
//     backward has not asked for the storage yet. The storage is gone when written. Offloaded storages that an Unpack
//     needs are read before the Unpack's replay. An offloaded storage is held from the first time that backward needs
//     the storage.
// 10. A streamed storage is written while the program continues. The storage is gone when the program has waited for
//     the end of the write. The program waits at the first of these events:
//       - the first operator that, by the times of the profile, begins after the storage is written;
//       - the beginning of the write of the second streamed storage after this storage;
//       - the first Unpack.
//     Streamed storages that the program lets go of after the first Unpack are treated like offloaded storages.
// 11. The transfer back of a streamed storage begins at the last Unpack from which, by the times of the profile, the
//     storage arrives before the storage is needed and before the next transfer back begins; but not before the event
//     that needs the storage two transfers earlier. From then on the storage takes memory.
//
// Two walks: the first walk finds replays and last uses, the second walk counts bytes. In the first walk a held storage
// stays to the end, which only adds storages that are never read.

namespace snug::plan {

Stays keep_all(const Profile& profile) {
  Stays plan(profile.storages.size(), Stay::never());
  const std::vector<bool> saved = profile.saved_storages();
  for (size_t s = 0; s < plan.size(); ++s) {
    plan[s] = saved[s] ? Stay::kept() : Stay::never();
  }
  return plan;
}

Simulator::Simulator(Profile profile) : profile_(std::move(profile)), producers_(profile_.storages.size()) {
  profile_.check();
  for (size_t s = 0; s < producers_.size(); ++s) {
    if (profile_.storages[s].kind == StorageKind::External) {
      producers_[s].push_back(-1);
    }
  }
  for (size_t i = 0; i < profile_.operators.size(); ++i) {
    const Operator& op = profile_.operators[i];
    std::vector<Value> needs = op.reads;
    for (const Value& value : op.writes) {
      producers_[static_cast<size_t>(value.storage)].push_back(static_cast<int>(i));
      if (value.version > 0) {
        needs.push_back({value.storage, value.version - 1});
      }
    }
    needs_.push_back(std::move(needs));
  }
}

int Simulator::producer(Value value) const {
  return producers_[static_cast<size_t>(value.storage)][static_cast<size_t>(value.version)];
}

int Simulator::last_version(int storage) const {
  return static_cast<int>(producers_[static_cast<size_t>(storage)].size()) - 1;
}

int Simulator::last_producer(int storage) const {
  const std::vector<int>& all = producers_[static_cast<size_t>(storage)];
  return all.empty() ? -1 : all.back();
}

class Simulator::Run {
 public:
  Run(const Simulator& model, const Stays& plan, int64_t most_replayed = std::numeric_limits<int64_t>::max())
      : model_(model),
        profile_(model.profile_),
        plan_(plan),
        most_replayed_(most_replayed),
        reasons_(plan.size(), 0),
        asked_before_drop_(plan.size(), false) {
    result_.last_use.assign(plan.size(), -1);
  }

  Simulation simulate() {
    if (!schedule()) {
      return std::move(result_);
    }
    count_bytes();
    if (streams_) {
      result_.written_by = std::move(streams_->places.written_by);
      result_.fetched_at = std::move(streams_->places.fetched_at);
    }
    return std::move(result_);
  }

  AtPeak at_peak() {
    if (schedule()) {
      count_bytes();
      capture_ = result_.peak_bytes;
      count_bytes();
    }
    return std::move(at_peak_);
  }

  // The functions of a ReplaySource, for the first walk.
  int last_version(int s) const { return model_.last_version(s); }
  bool is_there(int s) const { return external(s) || there(s); }
  bool bring(int s) {
    if (!is_there(s)) {
      if (!plan_[at(s)].leaves()) {
        return false;
      }
      loads_.push_back(s);
      reasons_[at(s)] |= kHeld;
    }
    touch(s);
    return true;
  }
  int maker(Value value) const {
    const int op = model_.producer(value);
    return op >= 0 && profile_.operators[at(op)].replayable && may_be_rebuilt(value.storage) ? op : -1;
  }
  const std::vector<Value>& needs(int op) const { return model_.needs(op); }
  const std::vector<Value>& writes(int op) const { return profile_.operators[at(op)].writes; }

 private:
  // Reasons for which a storage is in memory. Uses by the backward pass that are not done count above the others.
  enum Reason { kProgram = 1, kKept = 2, kHeld = 4, kMoves = 8, kUse = 16 };  // kMoves: a transfer, out or back

  bool external(int s) const { return profile_.storages[at(s)].kind == StorageKind::External; }
  bool may_be_rebuilt(int s) const { return profile_.storages[at(s)].kind == StorageKind::Activation; }
  int64_t bytes(int s) const { return profile_.storages[at(s)].bytes; }
  bool there(int s) const { return reasons_[at(s)] != 0; }
  bool is(int s, int reason) const { return (reasons_[at(s)] & reason) != 0; }
  void touch(int s) {
    if (std::exchange(result_.last_use[at(s)], event_) != event_) {
      touched_.emplace_back(event_, s);
    }
  }

  // The first walk. Returns false if the plan is impossible or the simulation is cut short.
  bool schedule() {
    const int events = static_cast<int>(profile_.events.size());
    for (int e = 0; e < events; ++e) {
      ++result_.steps;
      event_ = e;
      const Event& event = profile_.events[at(e)];
      if (event.kind == EventKind::Forward) {
        for (const Value& value : profile_.operators[at(event.index)].writes) {
          reasons_[at(value.storage)] |= kProgram | (plan_[at(value.storage)] == Stay::kept() ? kKept : 0);
        }
      } else if (event.kind == EventKind::Drop) {
        reasons_[at(event.index)] &= ~kProgram;
        if (plan_[at(event.index)].leaves() && result_.last_use[at(event.index)] >= 0) {
          reasons_[at(event.index)] |= kHeld;
          asked_before_drop_[at(event.index)] = true;
        }
      } else if (event.kind == EventKind::Unpack && !external(event.index)) {
        if (!schedule_replay(event.index)) {
          return false;
        }
        touch(event.index);
        reasons_[at(event.index)] += kUse;
      } else if (event.kind == EventKind::Done && !external(event.index)) {
        reasons_[at(event.index)] -= kUse;
        if (plan_[at(event.index)] == Stay::kept()) {
          touch(event.index);
        }
      }
    }
    return true;
  }

  bool schedule_replay(int target) {
    const FoundReplay& found = finder_.find(*this, {&target, 1}, most_replayed_ - result_.replayed);
    result_.steps += found.looked_at;
    result_.replayed += std::ssize(found.operators);
    result_.impossible = found.missing ? found.missing->storage : -1;
    result_.is_cut_short = found.is_cut_short;
    if (found.missing || found.is_cut_short) {
      return false;
    }
    if (!found.operators.empty() || !loads_.empty()) {
      for (const MadeAgain& one : found.made) {
        reasons_[at(one.storage)] |= is_to_stay(one) ? kHeld : 0;
      }
      made_.insert(made_.end(), found.made.begin(), found.made.end());
      made_by_.push_back(found.made.size());
      result_.replays.push_back({event_, std::exchange(loads_, {}), found.operators});
    }
    return true;
  }

  // Whether the plan wants to hold the storage. Whether a later need exists is known only after the first walk.
  bool is_to_stay(const MadeAgain& one) const {
    return one.may_stay && may_be_rebuilt(one.storage) && plan_[at(one.storage)].holds_rebuilt_at(event_);
  }

  // The second walk.
  void count_bytes() {
    const int events = static_cast<int>(profile_.events.size());
    reasons_.assign(reasons_.size(), 0);
    level_ = own_ = 0;
    next_replay_ = 0;
    made_later_ = made_;
    double seconds = 0;
    result_.peak_bytes = 0;
    result_.offloaded.clear();
    result_.high.assign(at(events), 0);
    auto touched = touched_.begin();
    begin_streams();
    for (int e = 0; e < events; ++e) {
      event_ = e;
      note_level(0);
      if (streams_) {
        meet_streams(profile_.events[at(e)], seconds);
      }
      step(profile_.events[at(e)], seconds);
      for (; touched != touched_.end() && touched->first == e; ++touched) {
        if (const int s = touched->second; result_.last_use[at(s)] == e) {
          change(s, reasons_[at(s)] & ~(kKept | kHeld));
        }
      }
    }
    result_.seconds = profile_.step_seconds(seconds, result_.has_tape(), result_.replayed);
  }

  void step(const Event& event, double& seconds) {
    const int s = event.index;
    switch (event.kind) {
      case EventKind::Forward:
        for (const Value& value : profile_.operators[at(s)].writes) {
          if (!external(value.storage)) {
            const bool is_kept = plan_[at(value.storage)] == Stay::kept() && result_.last_use[at(value.storage)] >= 0;
            change(value.storage, reasons_[at(value.storage)] | kProgram | (is_kept ? kKept : 0));
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
          change(s, reasons_[at(s)] + kUse);
        }
        return;
      case EventKind::Done:
        if (!external(s)) {
          change(s, reasons_[at(s)] - kUse);
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

  // --- storages that leave

  bool leaves_when_dropped(int s, int dropped_at) const {
    return plan_[at(s)].leaves() && result_.last_use[at(s)] > dropped_at && !asked_before_drop_[at(s)];
  }

  void begin_streams() {
    link_is_free_at_ = {0, 0};
    if (std::find(plan_.begin(), plan_.end(), Stay::streamed()) == plan_.end()) {
      return;
    }
    std::vector<bool> leaves(plan_.size(), false);
    for (size_t e = 0; e < profile_.events.size(); ++e) {
      const int s = profile_.events[e].index;
      if (profile_.events[e].kind == EventKind::Drop) {
        leaves[at(s)] = leaves_when_dropped(s, static_cast<int>(e));
      }
    }
    streams_.emplace(Streams{.places = place_streams(profile_, plan_, result_.replays, leaves)});
    result_.steps += std::ssize(profile_.events);
    streams_->arrives.assign(plan_.size(), 0);
    for (int s = 0; s < static_cast<int>(plan_.size()); ++s) {
      for (const auto* places : {&streams_->places.written_by, &streams_->places.fetched_at}) {
        if ((*places)[at(s)] >= 0) {
          streams_->met.emplace_back((*places)[at(s)], s);
        }
      }
    }
    std::sort(streams_->met.begin(), streams_->met.end());
  }

  // Called before each event. All transfers out end at the first Unpack, so a storage whose transfer back begins is not
  // in transfer out any more.
  void meet_streams(const Event& event, double& seconds) {
    if (event.kind == EventKind::Unpack && !external(event.index)) {
      streams_->is_backward = true;
      while (!streams_->out.empty()) {
        wait_for_oldest(seconds);
      }
    }
    for (size_t& next = streams_->next_met; next < streams_->met.size() && streams_->met[next].first == event_;
         ++next) {
      const int s = streams_->met[next].second;
      if (!streams_->is_backward) {
        while (is(s, kMoves)) {
          wait_for_oldest(seconds);
        }
      } else if (!there(s)) {
        streams_->arrives[at(s)] = transfer(link_is_free_at_.back, seconds, profile_.link.back_seconds(bytes(s)));
        change(s, kMoves);
      }
    }
  }

  void wait_for_oldest(double& seconds) {
    const int s = streams_->out.front();
    streams_->out.pop_front();
    seconds = std::max(seconds, streams_->arrives[at(s)]);
    change(s, reasons_[at(s)] & ~kMoves);
  }

  // Returns the time at which the transfer ends.
  static double transfer(double& is_free_at, double now, double takes) {
    is_free_at = std::max(is_free_at, now) + takes;
    return is_free_at;
  }

  void send(int s, double& seconds) {
    const bool streams = streams_ && plan_[at(s)] == Stay::streamed() && !streams_->is_backward;
    if (streams && std::ssize(streams_->out) == kStreamsAtOnce) {
      wait_for_oldest(seconds);
    }
    const double over = transfer(link_is_free_at_.out, seconds, profile_.link.out_seconds(bytes(s)));
    if (streams) {
      streams_->arrives[at(s)] = over;
      reasons_[at(s)] |= kMoves;  // in memory already, so the level is the same
      streams_->out.push_back(s);
    } else {
      seconds = over;
    }
    result_.offloaded.push_back(s);
  }

  void fetch(int s, double& seconds) {
    seconds = is(s, kMoves) ? std::max(seconds, streams_->arrives[at(s)])
                            : transfer(link_is_free_at_.back, seconds, profile_.link.back_seconds(bytes(s)));
    change(s, (reasons_[at(s)] & ~kMoves) | kHeld);
  }

  void drop(int s, double& seconds) {
    const bool is_needed = plan_[at(s)].leaves() && result_.last_use[at(s)] > event_;
    if (leaves_when_dropped(s, event_)) {
      send(s, seconds);
    }
    const int held = is_needed && asked_before_drop_[at(s)] ? kHeld : 0;
    change(s, (reasons_[at(s)] & ~kProgram) | held);
  }

  void run_replay(int target, double& seconds) {
    const Replay& replay = result_.replays[next_replay_];
    for (const int s : replay.loads) {
      fetch(s, seconds);
    }
    const std::span<MadeAgain> made = made_later_.first(made_by_[next_replay_++]);
    made_later_ = made_later_.subspan(made.size());
    const auto holds = [&](const MadeAgain& one) {
      return is_to_stay(one) && result_.last_use[at(one.storage)] > event_;
    };
    for (MadeAgain& one : made) {
      one.stays = holds(one) || (one.may_stay && one.storage == target);
    }
    releases_.sort(made, replay.operators.size());
    in_replay_ = made;
    auto begins = made.begin();
    for (int k = 0; k < static_cast<int>(replay.operators.size()); ++k) {
      const Operator& op = profile_.operators[at(replay.operators[at(k)])];
      replay_position_ = k;
      for (; begins != made.end() && begins->first == k; ++begins) {
        level_ += bytes(begins->storage);
      }
      note_level(op.workspace);
      seconds += op.seconds;
      for (const int i : releases_.after(k)) {
        level_ -= bytes(made[at(i)].storage);
      }
    }
    in_replay_ = {};
    result_.steps += 2 * std::ssize(made);
    for (const MadeAgain& one : made) {
      if (one.stays) {
        level_ -= bytes(one.storage);  // counted again here, or as a use by step()
      }
      if (holds(one)) {
        change(one.storage, reasons_[at(one.storage)] | kHeld);
      }
    }
  }

  // From now on, storage `s` is in memory for the reasons `now`.
  void change(int s, int now) {
    const int before = std::exchange(reasons_[at(s)], now);
    if (before != 0 && now == 0) {
      level_ -= bytes(s);
    } else if (before == 0 && now != 0) {
      level_ += bytes(s);
      note_level(0);
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
      capture(above);
    }
  }

  // `above`: the workspace of the operator that runs.
  void capture(int64_t above) {
    const Event& event = profile_.events[at(event_)];
    const int running = !in_replay_.empty() ? result_.replays[next_replay_ - 1].operators[at(replay_position_)]
                        : event.kind == EventKind::Forward ? event.index
                                                           : -1;
    std::vector<bool> is_operand(plan_.size(), false), is_used_later(plan_.size(), false);
    if (running >= 0) {
      at_peak_.runs = profile_.operators[at(running)].name;
      for (const auto* values : {&needs(running), &writes(running)}) {
        for (const Value& value : *values) {
          is_operand[at(value.storage)] = true;
        }
      }
    }
    at_peak_.bytes[AtPeak::Operator] += above;
    for (int op = capture_own(event); op < static_cast<int>(profile_.operators.size()); ++op) {
      for (const Value& value : needs(op)) {
        is_used_later[at(value.storage)] = true;
      }
    }
    const auto add = [&](int s, AtPeak::Kind kind) {
      at_peak_.bytes[kind] += bytes(s);
      at_peak_.storages.push_back(s);
    };
    for (int s = 0; s < static_cast<int>(plan_.size()); ++s) {
      if (!external(s) && there(s)) {
        const bool has_to_stay = is(s, kKept) && maker({s, last_version(s)}) < 0;
        add(s, reasons_[at(s)] >= kUse || is_operand[at(s)] ? AtPeak::Operator
               : !is(s, kProgram) || has_to_stay            ? AtPeak::Kept
               : is_used_later[at(s)]                       ? AtPeak::HeldForUse
                                                            : AtPeak::HeldIdle);
      }
    }
    for (const MadeAgain& one : in_replay_) {
      if (one.first <= replay_position_ && (one.last >= replay_position_ || one.stays)) {
        const bool is_asked_for = is_operand[at(one.storage)] || one.storage == event.index;
        add(one.storage, is_asked_for ? AtPeak::Operator : one.stays ? AtPeak::Kept : AtPeak::Replay);
      }
    }
  }

  // Sorts the bytes that are in no storage. The bytes have no names, so bytes that were alive at one moment and never
  // fewer since count as the same bytes. Returns the number of operators of the forward pass that have begun.
  int capture_own(const Event& event) {
    int begun = event.kind == EventKind::Forward ? 1 : 0;
    size_t steps = 0;  // of the backward pass, that are over
    int64_t own = 0, since_forward = 0, since_step = 0, gradients = 0;
    for (int e = 0; e < event_; ++e) {
      const Event& before = profile_.events[at(e)];
      own += before.kind == EventKind::Allocate ? before.bytes : before.kind == EventKind::Release ? -before.bytes : 0;
      since_forward = std::min(since_forward, own);
      since_step = std::min(since_step, own);
      if (before.kind == EventKind::Forward) {
        ++begun;
        since_forward = since_step = own;
      } else if (before.kind == EventKind::Backward) {
        gradients += profile_.backward[at(before.index)].gradient_bytes;
        since_step = own;
        ++steps;
      }
    }
    const bool is_forward = event.kind == EventKind::Forward || begun < static_cast<int>(profile_.operators.size());
    since_forward = is_forward ? own_ : since_forward;
    gradients = std::min(gradients, own_ - since_forward);
    const int64_t on_their_way = std::max<int64_t>(0, since_step - since_forward - gradients);
    at_peak_.bytes[AtPeak::Other] += since_forward;
    at_peak_.bytes[AtPeak::Gradients] += gradients;
    at_peak_.bytes[AtPeak::OnTheirWay] += on_their_way;
    at_peak_.bytes[AtPeak::Operator] += own_ - since_forward - gradients - on_their_way;
    if (!is_forward && at_peak_.runs.empty() && steps < profile_.backward.size()) {
      at_peak_.runs = profile_.backward[steps].name;
    }
    return begun;
  }

  struct Streams {
    StreamPlaces places;
    // Events, with storages whose transfer out is waited for, or whose transfer back begins.
    std::vector<std::pair<int, int>> met = {};
    size_t next_met = 0;
    std::vector<double> arrives = {};
    std::deque<int> out = {};  // storages in transfer out, the oldest first
    bool is_backward = false;
  };
  struct Link {
    double out, back;
  };

  const Simulator& model_;
  const Profile& profile_;
  const Stays& plan_;
  const int64_t most_replayed_;
  Simulation result_;
  std::vector<int> reasons_;             // per storage: why the storage is in memory; 0: it is not
  std::vector<bool> asked_before_drop_;  // per storage that leaves: by the backward pass
  ReplayFinder finder_;
  std::vector<int> loads_;                    // of the current replay
  std::vector<MadeAgain> made_;               // by all replays
  std::vector<size_t> made_by_;               // per replay: how many of made_
  std::span<MadeAgain> made_later_;           // of made_, in the second walk
  std::vector<std::pair<int, int>> touched_;  // events, with storages that the plan needs there
  std::span<const MadeAgain> in_replay_;
  ReleaseOrder releases_;  // of the current replay
  int replay_position_ = 0;
  size_t next_replay_ = 0;
  int event_ = 0;
  std::optional<Streams> streams_;  // in the second walk, if the plan streams
  Link link_is_free_at_ = {0, 0};
  int64_t level_ = 0, own_ = 0, capture_ = -1;
  AtPeak at_peak_;
};

Simulation Simulator::run(const Stays& stays, int64_t most_replayed) const {
  if (stays.size() != profile_.storages.size()) {
    throw ConfigError(
        fmt::format("Planning: the plan has {} entries, the profile {} storages; they do not belong together",
                    stays.size(), profile_.storages.size()));
  }
  if (!profile_.link.is_open() && std::any_of(stays.begin(), stays.end(), [](Stay stay) { return stay.leaves(); })) {
    throw ConfigError("Planning: the plan offloads, and the profile has no link to offload over; give it one");
  }
  return Run(*this, stays, most_replayed).simulate();
}

AtPeak Simulator::at_peak(const Stays& stays) const { return Run(*this, stays).at_peak(); }

}  // namespace snug::plan
