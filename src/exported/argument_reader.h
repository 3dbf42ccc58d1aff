#pragma once
// Reads names and arguments of a graph's nodes. The names of values become slots, and arguments are made fit for the
// schemas of operators.

#include <string>
#include <unordered_map>

#include "src/exported/graph.h"
#include "src/exported/union_json.h"

namespace snug::detail {

class ArgumentReader final {
 public:
  /// Makes a slot for a new value; returns -1 for an empty name, because nobody uses the value. Throws CorruptFile for
  /// a name that already has a slot.
  int new_slot(const std::string& name);
  /// The number of slots.
  int slots() const { return slots_; }

  /// A value that was made before. `type` is the schema's, or null without a schema. Throws CorruptFile for an unknown
  /// name.
  GraphArgument value_named(const std::string& name, const c10::TypePtr& type = nullptr) const;
  /// An argument in the file: a value, a constant or a list of values and constants, as `type`. Throws ConfigError for
  /// kinds that are not supported, CorruptFile for content that torch.export does not write.
  GraphArgument argument_of(const ExportJson& json, const c10::TypePtr& type = nullptr) const;

 private:
  GraphArgument read(const ExportJson& json, const c10::TypePtr& type) const;
  GraphArgument read_plain(const ExportJson& json, const c10::TypePtr& type) const;

  std::unordered_map<std::string, int> slot_of_;
  int slots_ = 0;
};

GraphArgument constant_argument(c10::IValue value);

/// The name of a value: {"as_tensor": {"name": "x"}}, {"as_sym_int": {"as_name": "s"}}; empty for values without one.
std::string name_of_value(const ExportJson& argument);

}  // namespace snug::detail
