#pragma once
// StateDict: named values that must survive a restart. Stateful: an object that gives and takes a StateDict.
//
//   snug::StateDict state;
//   state.set("step", int64_t{12});
//   state.set("momentum", tensor);
//   int64_t step = state.get<int64_t>("step");     // throws CorruptFile and names the key if absent or of another type
//
// SnapshotStore stores StateDicts and knows nothing of optimizers, scalers or samplers.
//
// RngState: the state of torch's default random generators, captured and restored. Exact resume is based on RngState.
//
//   const auto state = snug::RngState::capture();
//   auto a = torch::rand(3);
//   state.restore();
//   auto b = torch::rand(3);   // equal to a
//
// The generators belong to the process: numbers that other threads draw between capture() and restore() are drawn again
// afterwards.
//
// is_out_of_memory: recognises the exceptions that mean a lack of tensor memory.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

/// An ordered map from names to tensors, integers, doubles, booleans, strings or further StateDicts. Names are unique;
/// entries keep the order of the first `set`. Tensors are kept by reference, as everywhere in torch: clone a tensor
/// that will change.
class StateDict {
 public:
  /// The types that an entry may have. A StateDict may contain StateDicts.
  using Value = std::variant<at::Tensor, int64_t, double, bool, std::string, StateDict>;
  struct Entry;

  StateDict();
  StateDict(const StateDict&);
  StateDict(StateDict&&) noexcept;
  StateDict& operator=(const StateDict&);
  StateDict& operator=(StateDict&&) noexcept;
  ~StateDict();

  /// Adds the entry, or replaces the value of the entry with the same name.
  void set(const std::string& name, Value value);

  /// Whether the StateDict has an entry with `name`; whether the StateDict has no entries; and the number of entries.
  bool contains(const std::string& name) const;
  bool empty() const;
  size_t size() const;

  /// The value of the entry with `name`. Throws CorruptFile, with `name` and the names of all entries, if no entry has
  /// `name`.
  const Value& at(const std::string& name) const;

  /// The entry as a T (one of Value's alternatives). Throws CorruptFile if the entry is absent or of another type.
  template <class T>
  const T& get(const std::string& name) const;

  /// All entries, in order. Deleted for a temporary, because a temporary dies before a range-for over the entries ends.
  const std::vector<Entry>& entries() const&;
  const std::vector<Entry>& entries() && = delete;

 private:
  std::vector<Entry> entries_;
};

/// A name and its value.
struct StateDict::Entry {
  std::string name;
  Value value;
};

/// An object with state, seen from outside: `state` returns the state; `load` checks and restores a state. Made by
/// hand, or by snug::stateful(x) for modules, optimizers and scalers.
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

/// State of the CPU's default generator and of the default generator of every device of the accelerator in use.
class RngState {
 public:
  /// The state of all these generators now.
  static RngState capture();
  /// Puts the generators back into the captured state.
  void restore() const;
  /// Whether the generators are in the captured state now. Also false if another generator has come into use since.
  bool is_current() const;
  /// Whether both states give the same numbers. Also false if a generator came into use in between.
  bool operator==(const RngState& other) const;

  /// The state as bytes: an entry for the CPU, and one for each device.
  StateDict state_dict() const;
  /// Throws CorruptFile if an entry is missing, or is not a state of the generator of the torch in use. Skips devices
  /// that are absent on this machine.
  static RngState from_state_dict(const StateDict&);

 private:
  struct Copies;  // copies of the generators
  explicit RngState(std::shared_ptr<const Copies> copies) : copies_(std::move(copies)) {}
  std::shared_ptr<const Copies> copies_;
};

/// The generators as a part of a snapshot.
Stateful stateful_rng();

/// Whether an exception says that a device or LibTorch ran out of tensor memory:
/// - c10::OutOfMemoryError;
/// - the c10::Error with which CUDA and CUDA's libraries report a failed allocation of their own;
/// - the exceptions that an interpreter (TorchScript, Python) makes of the first two kinds;
/// - the ConfigError of a MemoryLimit below the bytes that are taken already.
bool is_out_of_memory(const std::exception& error);

}  // namespace snug
