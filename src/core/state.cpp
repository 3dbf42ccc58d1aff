#include "snug/state.h"

#include <algorithm>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug {

StateDict::StateDict() = default;
StateDict::StateDict(const StateDict&) = default;
StateDict::StateDict(StateDict&&) noexcept = default;
StateDict& StateDict::operator=(const StateDict&) = default;
StateDict& StateDict::operator=(StateDict&&) noexcept = default;
StateDict::~StateDict() = default;

namespace {
auto find(const std::vector<StateDict::Entry>& entries, const std::string& name) {
  return std::find_if(entries.begin(), entries.end(),
                      [&](const StateDict::Entry& entry) { return entry.name == name; });
}
}  // namespace

void StateDict::set(const std::string& name, Value value) {
  const auto found = find(entries_, name);
  if (found == entries_.end()) {
    entries_.push_back({name, std::move(value)});
  } else {
    entries_[static_cast<size_t>(found - entries_.begin())].value = std::move(value);
  }
}

bool StateDict::contains(const std::string& name) const { return find(entries_, name) != entries_.end(); }

bool StateDict::empty() const { return entries_.empty(); }

size_t StateDict::size() const { return entries_.size(); }

const std::vector<StateDict::Entry>& StateDict::entries() const& { return entries_; }

const StateDict::Value& StateDict::at(const std::string& name) const {
  const auto found = find(entries_, name);
  if (found == entries_.end()) {
    std::string known;
    for (const StateDict::Entry& entry : entries_) {
      known += (known.empty() ? "" : ", ") + entry.name;
    }
    throw CorruptFile(fmt::format(
        "StateDict.at: no entry '{}' among [{}]; was this state saved by another version or object?", name, known));
  }
  return found->value;
}

void detail::throw_wrong_state_type(const std::string& name) {
  throw CorruptFile(
      fmt::format("StateDict.get: entry '{}' has another type than expected; was this state saved by another "
                  "version or object?",
                  name));
}

}  // namespace snug
