#pragma once
// A number of a state that Python may have saved. Python writes an integer if the user gave an integer, as in
// momentum=0.

#include <cstdint>
#include <string>
#include <variant>

#include "snug/state.h"

namespace snug::detail {

/// The double or integer with this name. Throws CorruptFile if the entry is absent or of another type.
inline double number_in(const StateDict& state, const std::string& name) {
  const auto* integer = std::get_if<int64_t>(&state.at(name));
  return integer != nullptr ? static_cast<double>(*integer) : state.get<double>(name);
}

}  // namespace snug::detail
