#pragma once
// Storages, operators and events are numbered by int; containers are indexed by size_t.

#include <cstddef>

namespace snug::plan {

inline size_t at(int index) { return static_cast<size_t>(index); }

}  // namespace snug::plan
