#include "src/remat/tape_schedule.h"

#include <algorithm>
#include <limits>

#include <c10/util/Exception.h>
#include <c10/util/hash.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/planner/simulator.h"

// How a plan becomes a schedule
//
// Problem: a plan and the plan's simulation speak of a profile's events. A tape sees no events: a tape sees operators
// that run, and storages that backward asks for.
//
// Choice: both are numbered as the tape meets them. Operators are numbered without the profile's plan::kOtherWrite
// entries, because no operator makes such a write. Unpack events are numbered from 0. Events of the plan and of the
// simulation become these numbers:
//
//   needed_until   the unpacking of a storage's last use
//   last_for       the same, listed by unpacking
//   hold_from      the first unpacking at which the plan holds a rebuilt copy
//   waits_for      streamed storages, at the operator that waits for the write
//   fetches        streamed storages, at the unpacking at which the load begins
//
// A storage that backward never asks for is kept while autograd has a tensor on the storage, as in plain training.
//
// Consequence: a schedule fits one sequence of operators, so the tape compares each operator with the schedule.

namespace snug::detail {
namespace {

TapeSchedule::Made made_by(const plan::Operator& op, const plan::Profile& profile) {
  const size_t dot = op.name.find('.');
  const c10::OperatorName name(op.name.substr(0, dot), dot == std::string::npos ? "" : op.name.substr(dot + 1));
  TapeSchedule::Made made{.name = op.name,
                          .op = c10::Dispatcher::singleton().findSchema(name),
                          .wiring = wiring_of(op.reads, op.writes),
                          .is_replayable = op.replayable};
  for (const plan::Value& value : op.writes) {
    const plan::Storage& storage = profile.storages[static_cast<size_t>(value.storage)];
    if (value.version == 0 && storage.kind != plan::StorageKind::External) {
      made.bytes.push_back(storage.bytes);
    }
  }
  return made;
}

}  // namespace

c10::Device device_of(const plan::Profile& profile) {
  try {
    return c10::Device(profile.device);
  } catch (const c10::Error&) {
    throw ConfigError(fmt::format("plan: its profile is of '{}', which is no device; plan again", profile.device));
  }
}

size_t wiring_of(std::span<const plan::Value> reads, std::span<const plan::Value> writes) {
  size_t hash = 0;
  const auto add = [&](plan::Value value) {
    hash = c10::hash_combine(c10::hash_combine(hash, static_cast<size_t>(value.storage)),
                             static_cast<size_t>(value.version));
  };
  for (const plan::Value& value : reads) {
    if (std::none_of(writes.begin(), writes.end(), [&](plan::Value w) { return w.storage == value.storage; })) {
      add(value);
    }
  }
  std::for_each(writes.begin(), writes.end(), add);
  return hash;
}

TapeSchedule make_schedule(const plan::Profile& profile, const plan::Stays& plan, const plan::Simulation& simulation,
                           const std::shared_ptr<OffloadStore>& store) {
  TapeSchedule schedule{.device = device_of(profile)};
  std::vector<int> place_of(profile.operators.size(), -1);  // index in the schedule's operators
  for (size_t i = 0; i < profile.operators.size(); ++i) {
    if (profile.operators[i].name != plan::kOtherWrite) {
      place_of[i] = static_cast<int>(schedule.operators.size());
      schedule.operators.push_back(made_by(profile.operators[i], profile));
    }
  }
  std::vector<int> event_of;  // per unpacking
  std::vector<int> unpacking_at(profile.events.size(), -1);
  for (size_t e = 0; e < profile.events.size(); ++e) {
    if (profile.events[e].kind == plan::EventKind::Unpack) {
      unpacking_at[e] = static_cast<int>(event_of.size());
      event_of.push_back(static_cast<int>(e));
      schedule.unpackings.push_back({.storage = profile.events[e].index});
    }
  }
  const std::vector<bool> asked_for = profile.saved_storages();
  for (size_t s = 0; s < profile.storages.size(); ++s) {
    const int last_use = simulation.last_use[s];
    const bool is_kept = plan[s] == plan::Stay::kept() && last_use >= 0;
    const bool may_be_rebuilt = profile.storages[s].kind == plan::StorageKind::Activation;
    const bool is_offloaded =
        plan[s].leaves() && last_use >= 0 && profile.storages[s].kind != plan::StorageKind::External;
    if (is_offloaded && schedule.store == nullptr) {
      schedule.store = store ? store : make_offload_store(profile.link);
    }
    const int needed_until = last_use < 0 ? -1 : unpacking_at[static_cast<size_t>(last_use)];
    if (needed_until >= 0) {
      schedule.unpackings[static_cast<size_t>(needed_until)].last_for.push_back(static_cast<int>(s));
    }
    if (is_offloaded && plan[s] == plan::Stay::streamed()) {
      if (const int event = simulation.written_by[s]; event >= 0) {
        const int op = profile.events[static_cast<size_t>(event)].index;
        schedule.operators[static_cast<size_t>(place_of[static_cast<size_t>(op)])].waits_for.push_back(
            static_cast<int>(s));
      }
      if (const int event = simulation.fetched_at[s]; event >= 0) {
        schedule.unpackings[static_cast<size_t>(unpacking_at[static_cast<size_t>(event)])].fetches.push_back(
            static_cast<int>(s));
      }
    }
    const auto hold_from = std::partition_point(event_of.begin(), event_of.end(), [&](int event) {
      return !may_be_rebuilt || !plan[s].holds_rebuilt_at(event);
    });
    schedule.storages.push_back({.keep_from_start = is_kept,
                                 .keep_if_saved = is_kept || !asked_for[s],
                                 .hold_from = hold_from == event_of.end()
                                                  ? std::numeric_limits<int>::max()
                                                  : static_cast<int>(hold_from - event_of.begin()),
                                 .is_pinned = profile.storages[s].kind == plan::StorageKind::Pinned,
                                 .is_offloaded = is_offloaded,
                                 .streams = is_offloaded && plan[s] == plan::Stay::streamed(),
                                 .needed_until = needed_until});
  }
  for (size_t n = 0; n < schedule.unpackings.size(); ++n) {
    schedule.storages[static_cast<size_t>(schedule.unpackings[n].storage)].unpacked_at.push_back(static_cast<int>(n));
  }
  return schedule;
}

}  // namespace snug::detail
