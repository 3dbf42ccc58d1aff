#include "src/planner/storage_uses.h"

#include <algorithm>

#include "src/planner/at.h"

namespace snug::plan {

StorageUses::StorageUses(const Simulator& simulator)
    : first_writer(simulator.profile().storages.size(), kNone),
      last_writer(first_writer),
      readers(first_writer.size()),
      dropped_at(first_writer.size(), static_cast<int>(simulator.profile().events.size())),
      unpacked_at(dropped_at),
      saved(simulator.profile().saved_storages()),
      droppable(first_writer.size(), false) {
  find_writers_and_readers(simulator);
  find_events(simulator.profile());
  find_droppable(simulator);
}

int StorageUses::last_user(int storage) const {
  const std::vector<int>& all = readers[at(storage)];
  return std::max(last_writer[at(storage)], all.empty() ? kNone : all.back());
}

void StorageUses::find_writers_and_readers(const Simulator& simulator) {
  const Profile& profile = simulator.profile();
  for (int i = 0; i < static_cast<int>(profile.operators.size()); ++i) {
    for (const Value& value : simulator.needs(i)) {
      std::vector<int>& all = readers[at(value.storage)];
      if (all.empty() || all.back() != i) {
        all.push_back(i);
      }
    }
    for (const Value& value : profile.operators[at(i)].writes) {
      int& first = first_writer[at(value.storage)];
      first = first == kNone ? i : first;
      last_writer[at(value.storage)] = i;
    }
  }
}

void StorageUses::find_events(const Profile& profile) {
  for (int e = 0; e < static_cast<int>(profile.events.size()); ++e) {
    const Event& event = profile.events[at(e)];
    if (event.kind == EventKind::Forward) {
      backward = e + 1;
    } else if (event.kind == EventKind::Drop) {
      dropped_at[at(event.index)] = e;
    } else if (event.kind == EventKind::Unpack) {
      unpacked_at[at(event.index)] = std::min(unpacked_at[at(event.index)], e);
    }
  }
  for (const Storage& storage : profile.storages) {
    may_leave.push_back(profile.link.is_open() && storage.kind != StorageKind::External && storage.bytes > 0);
  }
}

// Follows rule 7 of simulator.cpp. An operator can run again if each needed value is kept at the last version, or can
// be made again. An operator that read an older version of an external storage cannot run again.
void StorageUses::find_droppable(const Simulator& simulator) {
  const Profile& profile = simulator.profile();
  const auto kind = [&](int s) { return profile.storages[at(s)].kind; };
  for (size_t s = 0; s < droppable.size(); ++s) {
    droppable[s] = profile.storages[s].kind == StorageKind::Activation && dropped_at[s] < backward;
  }
  std::vector<bool> can_run(profile.operators.size(), false);
  const auto will_be_there = [&](const Value& value) {
    const bool is_last = value.version == simulator.last_version(value.storage);
    if (is_last && (kind(value.storage) != StorageKind::Activation || !droppable[at(value.storage)])) {
      return true;  // no plan drops the storage
    }
    const int op = simulator.producer(value);
    return kind(value.storage) == StorageKind::Activation && op >= 0 && can_run[at(op)];
  };
  for (int i = 0; i < static_cast<int>(profile.operators.size()); ++i) {
    const Operator& op = profile.operators[at(i)];
    const std::vector<Value>& needs = simulator.needs(i);
    can_run[at(i)] = op.replayable && std::all_of(needs.begin(), needs.end(), will_be_there);
    for (const Value& value : op.writes) {
      droppable[at(value.storage)] = droppable[at(value.storage)] && can_run[at(i)];
    }
  }
}

}  // namespace snug::plan
