#pragma once
// StateDict: named values that must survive a restart. Stateful: an object that gives and takes a StateDict.
//
//   snug::StateDict state;
//   state.set("step", int64_t{12});
//   state.set("momentum", tensor);
//   int64_t step = state.get<int64_t>("step");     // throws CorruptFile and names the key if absent or of another type
//
// io/snapshot stores StateDicts and knows nothing of optimizers, scalers or samplers.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

struct StateEntry;

/// An ordered map from names to tensors, integers, doubles, booleans, strings or further StateDicts. Names are unique;
/// order is that of the first `set`. Tensors are held by reference, as everywhere in torch: clone what will change.
class StateDict {
 public:
  /// The types that an entry may have. A StateDict nests.
  using Value = std::variant<at::Tensor, int64_t, double, bool, std::string, StateDict>;

  StateDict();
  StateDict(const StateDict&);
  StateDict(StateDict&&) noexcept;
  StateDict& operator=(const StateDict&);
  StateDict& operator=(StateDict&&) noexcept;
  ~StateDict();

  /// Adds the entry, or replaces the value of the one that has this name.
  void set(const std::string& name, Value value);

  /// Whether there is an entry of this name; whether there is none at all; and the number of entries.
  bool contains(const std::string& name) const;
  bool empty() const;
  size_t size() const;

  /// Throws CorruptFile, with the name and the names that are there, if there is no such entry.
  const Value& at(const std::string& name) const;

  /// The entry as a T (one of Value's alternatives). Throws CorruptFile if absent or of another type.
  template <class T>
  const T& get(const std::string& name) const;

  /// All entries, in order. Deleted for a temporary, which would not live as long as a range-for over its entries.
  const std::vector<StateEntry>& entries() const&;
  const std::vector<StateEntry>& entries() && = delete;

 private:
  std::vector<StateEntry> entries_;
};

/// A name and its value.
struct StateEntry {
  std::string name;
  StateDict::Value value;
};

/// An object with state, seen from outside: `state` returns it; `load` checks and restores it. Made by hand, or by
/// snug::stateful(x) for modules, optimizers, scalers and schedules.
struct Stateful {
  std::function<StateDict()> state;
  std::function<void(const StateDict&)> load;
};

namespace detail {
[[noreturn]] void throw_wrong_state_type(const std::string& name);
}

template <class T>
const T& StateDict::get(const std::string& name) const {
  const auto* value = std::get_if<T>(&at(name));
  if (value == nullptr) {
    detail::throw_wrong_state_type(name);
  }
  return *value;
}

}  // namespace snug
