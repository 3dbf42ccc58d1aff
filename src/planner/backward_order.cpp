#include "src/planner/backward_order.h"

#include <algorithm>

#include "src/planner/at.h"

// The planner must know when the backward pass comes to each operator, but a profile does not say for which operator a
// storage is unpacked. Two facts help: the operator wrote or read the storage, and the backward pass goes through
// operators roughly from the last to the first.
//
// So the longest sequence of Unpacks is searched whose operators fall. Each Unpack may be for any of a few users of the
// unpacked storage: the first Unpack for any of the last users, and so on. The search is patience sorting (Fredman
// 1975). Unpacks out of order are left out, for example Unpacks of two backward passes one after the other. A node may
// ask for several storages: the first counts, because a rebuild at the first can make all of the storages.

namespace snug::plan {
namespace {

// Users that an Unpack may be for, on each side of the user that would be right if every user saved the storage.
constexpr int kBeside = 3;

std::vector<std::vector<int>> users_of(const Profile& profile, const StorageUses& uses) {
  std::vector<std::vector<int>> users = uses.readers;
  for (int i = 0; i < static_cast<int>(profile.operators.size()); ++i) {
    for (const Value& value : profile.operators[at(i)].writes) {
      users[at(value.storage)].push_back(i);
    }
  }
  for (std::vector<int>& list : users) {
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
  }
  return users;
}

// The longest sequence of added links whose operators fall.
class LongestFall {
 public:
  void add(int op, int event) {
    const auto after =
        std::partition_point(ends_.begin(), ends_.end(), [&](int end) { return links_[at(end)].op > op; });
    links_.push_back({op, event, after == ends_.begin() ? StorageUses::kNone : *std::prev(after)});
    const int number = static_cast<int>(links_.size()) - 1;
    if (after == ends_.end()) {
      ends_.push_back(number);
    } else {
      *after = number;
    }
  }

  template <class Visit>
  void visit(const Visit& visit) const {
    for (int i = ends_.empty() ? StorageUses::kNone : ends_.back(); i != StorageUses::kNone; i = links_[at(i)].before) {
      visit(links_[at(i)].op, links_[at(i)].event);
    }
  }

 private:
  struct Link {
    int op;
    int event;
    int before;
  };
  std::vector<Link> links_;
  std::vector<int> ends_;  // per length: of all falls of the length, the link with the largest operator at the end
};

// The first of the Unpacks one after the other, up to `event`, that are all for storages used by the operator. Unpacks
// up to `before` are for later operators.
int first_unpack(const Profile& profile, const std::vector<std::vector<int>>& users, int op, int event, int before) {
  int first = event;
  for (int e = event - 1; e > before; --e) {
    if (profile.events[at(e)].kind == EventKind::Unpack) {
      if (!std::ranges::binary_search(users[at(profile.events[at(e)].index)], op)) {
        return first;
      }
      first = e;
    }
  }
  return first;
}

}  // namespace

std::vector<int> backward_events(const Profile& profile, const StorageUses& uses) {
  const std::vector<std::vector<int>> users = users_of(profile, uses);
  std::vector<int> in_use(users.size(), 0);
  std::vector<int> unpacked(users.size(), 0);
  LongestFall fall;
  for (int e = uses.backward; e < static_cast<int>(profile.events.size()); ++e) {
    const Event& event = profile.events[at(e)];
    if (event.kind == EventKind::Done) {
      --in_use[at(event.index)];
    } else if (event.kind == EventKind::Unpack && in_use[at(event.index)]++ == 0) {
      const std::vector<int>& list = users[at(event.index)];
      const int about = static_cast<int>(list.size()) - 1 - unpacked[at(event.index)]++;
      const int last = std::min(static_cast<int>(list.size()) - 1, about + kBeside);
      for (int i = std::max(0, about - kBeside); i <= last; ++i) {  // ascending, so that a fall has an Unpack only once
        fall.add(list[at(i)], e);
      }
    }
  }
  std::vector<int> result(profile.operators.size(), StorageUses::kNone);
  fall.visit([&](int op, int event) { result[at(op)] = event; });
  int before = uses.backward - 1;
  for (int op = static_cast<int>(result.size()) - 1; op >= 0; --op) {
    if (result[at(op)] != StorageUses::kNone) {
      const int last = result[at(op)];
      result[at(op)] = first_unpack(profile, users, op, last, before);
      before = last;
    }
  }
  return result;
}

}  // namespace snug::plan
